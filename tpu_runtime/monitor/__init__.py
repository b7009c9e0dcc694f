"""The numbers of a running process. May import `engine` and the leaves; reading them starts no device."""
