"""Loop IR as C++ text, and from the text to a loaded library."""
