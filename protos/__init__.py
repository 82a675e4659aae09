"""Wire contract: the protobuf package `kvtier.v1`, and binary formats outside of protobuf."""
