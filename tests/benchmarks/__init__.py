"""What `make bench` measures: every number that the project promises, each as a ratio to its reference in one run.

Rules kept here
- Subject and reference do the same work on the same workers, in turns (A B A B …), and both are checked: after every
  round each worker is asked for one value, after the first and the last for all its bytes.
- Weights change before every single turn, so that nobody is fast by having nothing to do.
- A ratio is the median over rounds of (subject / reference of the same round), shown with its quartiles.
- Every row runs in a process and a cluster of its own; one that breaks costs only itself.
"""
