"""What is different between two graphs, and between the steps of a run of passes."""
