"""What `kvtier doctor` looks at: a module per theme, and in each a function per check. None of them changes anything."""
