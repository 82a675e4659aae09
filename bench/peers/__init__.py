"""kvtier beside its peers: the same work, in the same run, every byte compared (`make bench-peers`)."""
