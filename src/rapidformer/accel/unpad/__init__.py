"""``--dynamic-shape``: blocks compute on real tokens only; padding is put back after the last."""
