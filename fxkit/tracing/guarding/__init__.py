"""What has to hold for a graph to stand in for a call, and how it is checked."""
