"""Labels of classifiers: what the user wrote, checked and numbered."""
