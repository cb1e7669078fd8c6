"""Which compiled program serves a call: by guards, by shapes, or eager."""
