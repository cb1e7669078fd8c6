"""One offline HTML file, and how it gets before somebody's eyes."""
