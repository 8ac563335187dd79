"""Which system calls a candidate does not get, by name and number: plain data; a test has the kernel's headers.

Linux numbers calls per architecture up to 423 and alike from 424 on. A number above ``LAST`` is a call that this table
has not judged, and does not exist for a candidate.
"""

from __future__ import annotations

LAST = 462
"""mseal, of Linux 6.10."""

Number = int | None
Table = dict[str, tuple[Number, Number]]  # name -> x86_64, aarch64

COUNTED: Table = {  # denied with EPERM; nobody honest needs them, so each try is counted
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "modify_ldt": (154, None),
    "seccomp": (317, 277),
    "mknod": (133, None),
    "mknodat": (259, 33),
}
QUIET: Table = {  # denied with EPERM; libraries try some of them in all innocence
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "lookup_dcookie": (212, 18),
    "migrate_pages": (256, 238),
    "nfsservctl": (180, 42),
    "personality": (135, 92),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
HIDDEN: Table = {"clone3": (435, 435)}
"""ENOSYS, so that the C library uses ``clone``, whose flags a filter can see."""
MEMORY_FILES: Table = {"memfd_create": (319, 279)}
"""Memory that no address-space limit counts: quietly denied where nothing else counts it."""
OF_DRIVERS = ("listen", "accept", "accept4")
"""Of COUNTED: allowed to who has a GPU, for the one socket that CUDA's driver listens on; binding is looked at."""
GROUPS: Table = {"setsid": (112, 157), "setpgid": (109, 154)}
"""Quietly denied where the process group is what ends a candidate's processes."""
OPENS: Table = {"open": (2, None), "openat": (257, 56), "openat2": (437, 437), "creat": (85, None)}
"""Looked at and let through: the kernel's view of files decides, and what was tried outside of it is counted."""
JUDGED: Table = {  # by their arguments
    "clone": (56, 220),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "sendto": (44, 206),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
}


def names(architecture: int) -> dict[int, str]:
    """Number -> name, of all that a filter may report."""
    both = [(name, pair[architecture]) for table in (COUNTED, OPENS, JUDGED) for name, pair in table.items()]
    return {number: name for name, number in both if number is not None}
