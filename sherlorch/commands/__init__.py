"""What the subcommands of `sherlorch` do: each returns an exit code or raises a `SherlorchError`."""
