"""Cases that those who write checks may read. One file per group of relations."""
