"""Wire contract: the protobuf package `kvtier.v1`, and frames that protobuf does not define."""
