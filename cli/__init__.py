"""The `carom` command. Each command is one module with `add_arguments(parser)` and `run(args) -> int`."""
