"""From a traced step to one program over the devices: what to combine, by which transformation."""
