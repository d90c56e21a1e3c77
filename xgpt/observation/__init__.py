"""Windows over the lengths of served requests, and the detection of a change in them."""
