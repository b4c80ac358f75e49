"""How the time of one update grows with nodes, workers and bytes: a model, its constants, and where it ends.

`model` predicts and is pure; `fitting` makes its constants of measurements; `page` writes docs/design/scaling.md.
"""
