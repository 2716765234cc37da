"""A task of one's own: data, a generate function with a tool, a reward."""
