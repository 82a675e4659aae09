"""Codecs of the binary formats that protobuf does not define."""
