"""Runs under the recorder, and the graphs they give: with guards, free sizes and free numbers."""
