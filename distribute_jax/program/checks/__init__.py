"""What no proof can show, tried on numbers: padding, rows that are counted, one device."""
