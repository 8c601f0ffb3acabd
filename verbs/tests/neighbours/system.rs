//! System calls without a safe wrapper.

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

/// Sends `signal` to the process `process`.
pub fn signal(process: u32, signal: libc::c_int) {
    // SAFETY: the call takes numbers only, and the process is a child of this one that was not waited for.
    let sent = unsafe { libc::kill(process as libc::pid_t, signal) };
    assert_eq!(sent, 0, "{}", io::Error::last_os_error());
}

/// Kills the processes of the group that the child `leader` led. No other group gets its number while a process is in the
/// group; if none is left, the call fails, or the number is too new to be in use again.
pub fn kill_group(leader: u32) {
    // SAFETY: the call takes numbers only.
    unsafe { libc::kill(-(leader as libc::pid_t), libc::SIGKILL) };
}

/// Asks the kernel to kill this process when the thread that started it ends.
pub fn die_with_parent() {
    // SAFETY: the call takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Returns whether this process may change its user.
pub fn may_change_user() -> bool {
    rustix::process::geteuid().is_root()
}

/// Changes the user and the group of this process. The process can still look at its own mappings and descriptors.
pub fn become_another_user() {
    const OTHER_USER: libc::uid_t = 65533;
    // SAFETY: the calls take numbers only, and change only this process.
    unsafe {
        libc::setgroups(0, std::ptr::null());
        libc::setresgid(OTHER_USER, OTHER_USER, OTHER_USER);
        let changed = libc::setresuid(OTHER_USER, OTHER_USER, OTHER_USER);
        assert_eq!(changed, 0, "{}", io::Error::last_os_error());
        libc::prctl(libc::PR_SET_DUMPABLE, 1);
    }
}

/// Runs a signal handler that never returns on thread `thread` of this process.
pub fn block_thread(thread: libc::pid_t) {
    extern "C" fn never_return(_: libc::c_int) {
        loop {
            // SAFETY: the call takes nothing, and a signal handler may call it.
            unsafe { libc::pause() };
        }
    }
    // SAFETY:
    // - the handler calls only functions that a signal handler may call, and
    // - the thread belongs to this process.
    unsafe {
        libc::signal(libc::SIGUSR1, never_return as *const () as libc::sighandler_t);
        libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGUSR1);
    }
}

/// Forks. The child runs `then` and exits with status 0. Returns whether the child did so within a minute.
pub fn fork_and_run(then: impl FnOnce()) -> bool {
    // SAFETY: the child uses the allocator, which the C library prepares for a fork, and the objects under test, which are to
    // be used after a fork. An alarm ends the child if it waits for a lock.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the calls take numbers only.
        unsafe { libc::alarm(60) };
        then();
        // SAFETY: the call ends the process, and runs the exit handlers as a program does.
        unsafe { libc::exit(0) };
    }
    let mut status = 0;
    // SAFETY: the child is one of this process, and `status` may be written.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    waited == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

/// Forks a process that does nothing for `seconds`, and ends this process at once by SIGKILL.
pub fn leave_a_fork_behind(seconds: u32) {
    // SAFETY: the child only sleeps and exits, and the parent only kills itself.
    unsafe {
        if libc::fork() == 0 {
            libc::sleep(seconds);
            libc::_exit(0);
        }
        libc::kill(libc::getpid(), libc::SIGKILL);
    }
}

/// Writes `bytes` over the mapping of this process at `start`, page by page. First tries to make a mapping writable that is not.
pub fn overwrite(start: usize, length: usize, writable: bool, byte: impl Fn(usize) -> u64) {
    let at = start as *mut u64;
    // SAFETY: the call only changes the protection of a mapping of this process. Nothing relies on a fault there.
    if !writable && unsafe { libc::mprotect(at.cast(), length, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
        return;
    }
    for index in 0..length / size_of::<u64>() {
        // SAFETY:
        // - the mapping was listed as writable, or was made so; and
        // - it is shared memory, to which no reference exists. If another thread unmapped it meanwhile, this hostile process
        //   crashes, which the test allows.
        unsafe { at.add(index).write_volatile(byte(index)) };
    }
}

/// Replaces the open descriptor `target` by a copy of `source`.
pub fn replace_descriptor(source: RawFd, target: RawFd) {
    // SAFETY: the call takes numbers only. This hostile process breaks its own descriptors on purpose.
    unsafe { libc::dup3(source, target, libc::O_CLOEXEC) };
}

/// Returns whether a descriptor is one end of a pair of unix sockets, neither of which has a name.
pub fn is_unnamed_pair(descriptor: RawFd) -> bool {
    // SAFETY: zeros make a valid address, and the calls write at most `length` bytes to it.
    unsafe {
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        let empty = size_of::<libc::sa_family_t>() as libc::socklen_t;
        let mut length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        let named = libc::getsockname(descriptor, (&raw mut address).cast(), &raw mut length);
        let own = (named, length);
        length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        let named = libc::getpeername(descriptor, (&raw mut address).cast(), &raw mut length);
        own == (0, empty)
            && (named, length) == (0, empty)
            && address.sun_family == libc::AF_UNIX as libc::sa_family_t
    }
}

/// Clears `O_NONBLOCK` of a descriptor, for all processes that share its open file.
pub fn make_blocking(descriptor: RawFd) {
    // SAFETY: the calls take numbers only.
    unsafe {
        let flags = libc::fcntl(descriptor, libc::F_GETFL);
        if flags >= 0 {
            libc::fcntl(descriptor, libc::F_SETFL, flags & !libc::O_NONBLOCK);
        }
    }
}

/// Sets the length of the file of a descriptor, if the kernel permits it, and punches a hole.
pub fn truncate(descriptor: RawFd) {
    // SAFETY: the calls take numbers only. This hostile process breaks its own memory on purpose.
    unsafe {
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        libc::fallocate(descriptor, hole, 0, 1 << 20);
        libc::ftruncate(descriptor, 0);
    }
}

/// Creates a memfd of huge pages; `None` if the kernel has none.
pub fn hugetlb_memfd() -> Option<RawFd> {
    // SAFETY: the name is a C string.
    let made = unsafe { libc::memfd_create(c"huge".as_ptr(), libc::MFD_HUGETLB | libc::MFD_ALLOW_SEALING) };
    (made >= 0).then_some(made)
}

/// Returns the processor time of this thread, and the number of times that it gave up its processor to wait.
pub fn thread_cost() -> (Duration, u64) {
    // SAFETY: zeros make a valid `timespec` and a valid `rusage`, and both may be written.
    let (time, usage) = unsafe {
        let (mut time, mut usage): (libc::timespec, libc::rusage) = (std::mem::zeroed(), std::mem::zeroed());
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time);
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        (time, usage)
    };
    (Duration::new(time.tv_sec as u64, time.tv_nsec as u32), usage.ru_nvcsw as u64)
}
