"""The Unix tools: one click command a file, each over the library."""
