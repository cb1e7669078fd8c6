"""The demo: a trained BERT goes through every layer of fxkit, and each step prints what it did."""
