"""Black-box tasks: a name chooses the model class, the columns, the collate and the metric."""
