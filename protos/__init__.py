"""Wire contract: the protobuf package `kvtier.v1`, and the framings outside protobuf."""
