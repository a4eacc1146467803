"""ZeRO-1, ZeRO-2 and ZeRO-3 (FSDP): one mechanism, three settings."""
