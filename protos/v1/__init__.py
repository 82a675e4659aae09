"""Generated messages and stubs of `kvtier.v1`; see `protos/kvtier/v1` for the contract."""
