"""Loop IR as C++ text, one file a kind of loop."""
