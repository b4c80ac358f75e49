"""One module a row. Each has a `measure(setting)` that yields results; `catalog` names them."""
