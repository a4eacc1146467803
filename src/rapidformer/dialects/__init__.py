"""Other systems' names, defaults and calls, translated into ours; nothing below knows them."""
