"""One page that tells what went in, what each pass did, and where the time goes."""
