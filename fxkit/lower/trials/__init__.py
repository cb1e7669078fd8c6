"""What is timed once against torch's library, where it may be the faster one."""
