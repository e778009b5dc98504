"""The stubs stand in for packages in the scripts' own processes, never in this one."""

collect_ignore = ["stubs"]
