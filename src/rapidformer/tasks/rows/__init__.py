"""The user's rows: tables, columns, and checks before anything slow starts."""
