"""Programs as scripts and data that run elsewhere, and the shrinking of programs and inputs."""
