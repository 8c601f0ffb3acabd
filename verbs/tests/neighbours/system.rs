//! System calls without a safe wrapper.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Sends `signal` to the process `process`.
pub fn signal(process: u32, signal: libc::c_int) {
    // SAFETY: the call takes numbers only, and the process is a child of this one that was not waited for.
    let sent = unsafe { libc::kill(process as libc::pid_t, signal) };
    assert_eq!(sent, 0, "{}", io::Error::last_os_error());
}

/// Kills the processes of the group that the child `leader` led. No other group gets its number while a
/// process is in the group; if none is left, the call fails, or the number is too new to be in use again.
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

/// A user that runs no tests.
pub const OTHER_USER: libc::uid_t = 65533;

/// Changes the user and the group of this process. The process can still look at its own mappings and
/// descriptors.
pub fn become_user(user: libc::uid_t) {
    page_that_never_comes();
    // SAFETY: the calls take numbers only, and change only this process.
    unsafe {
        libc::setgroups(0, std::ptr::null());
        libc::setresgid(user, user, user);
        let changed = libc::setresuid(user, user, user);
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
    // SAFETY: the child uses the allocator, which the C library prepares for a fork, and the objects under
    // test, which are to be used after a fork. An alarm ends the child if it waits for a lock.
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

/// Forks a process that holds what `then` returns, as long as the thread lives that called this.
pub fn fork_off<T>(then: impl FnOnce() -> T) {
    // SAFETY: the child uses the allocator, which the C library prepares for a fork, and makes objects of its
    // own only.
    if unsafe { libc::fork() } == 0 {
        die_with_parent();
        let _held = then();
        loop {
            // SAFETY: the call takes nothing.
            unsafe { libc::pause() };
        }
    }
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

/// Writes `bytes` over the mapping of this process at `start`, page by page. First tries to make a mapping
/// writable that is not.
pub fn overwrite(start: usize, length: usize, writable: bool, byte: impl Fn(usize) -> u64) {
    let at = start as *mut u64;
    // SAFETY: the call only changes the protection of a mapping of this process. Nothing relies on a fault
    // there.
    if !writable && unsafe { libc::mprotect(at.cast(), length, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
        return;
    }
    for index in 0..length / size_of::<u64>() {
        // SAFETY:
        // - the mapping was listed as writable, or was made so; and
        // - it is shared memory, to which no reference exists. If another thread unmapped it meanwhile, this
        //   hostile process crashes, which the test allows.
        unsafe { at.add(index).write_volatile(byte(index)) };
    }
}

/// Replaces the open descriptor `target` by a copy of `source`.
pub fn replace_descriptor(source: impl AsFd, target: RawFd) {
    // SAFETY: the call takes numbers only. This hostile process breaks its own descriptors on purpose.
    unsafe { libc::dup3(source.as_fd().as_raw_fd(), target, libc::O_CLOEXEC) };
}

/// Takes the place of this process's device at the socket on which it listens. The device listens on a new
/// socket with the name `name` instead. Returns the one that peers know.
pub fn take_listener(name: &SocketAddrUnix) -> OwnedFd {
    let number = |entry: std::io::Result<std::fs::DirEntry>| -> Option<RawFd> {
        entry.ok()?.file_name().to_str()?.parse().ok()
    };
    let numbers = || std::fs::read_dir("/proc/self/fd").unwrap().filter_map(number);
    let listens = |&fd: &RawFd| {
        // SAFETY: the descriptor is used only for this call, which fails if it is closed meanwhile.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::net::sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
            && rustix::net::sockopt::socket_acceptconn(fd) == Ok(true)
    };
    let listener = numbers().find(listens).expect("a device that listens");
    // The kernel says which epoll descriptor watches the listener, and with which data.
    let watch = |epoll: RawFd| {
        let watched = std::fs::read_to_string(format!("/proc/self/fdinfo/{epoll}")).ok()?;
        let line = watched.lines().find(|line| {
            line.strip_prefix("tfd:")
                .is_some_and(|line| line.split_whitespace().next() == Some(&*listener.to_string()))
        })?;
        let data = line.split_once("data:")?.1.split_whitespace().next()?;
        Some((epoll, u64::from_str_radix(data, 16).ok()?))
    };
    let (epoll, data) = numbers().find_map(watch).expect("a thread that waits for peers");
    let inner =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None)
            .unwrap();
    rustix::net::bind(&inner, name).unwrap();
    rustix::net::listen(&inner, 128).unwrap();
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: data };
    // SAFETY: this process exchanges what the device's own descriptor stands for, on purpose. The copy is
    // owned by nothing else.
    unsafe {
        let outer = OwnedFd::from_raw_fd(libc::fcntl(listener, libc::F_DUPFD_CLOEXEC, 3));
        libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, listener, &raw mut event);
        libc::dup3(inner.as_raw_fd(), listener, libc::O_CLOEXEC);
        libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, listener, &raw mut event);
        outer
    }
}

/// Returns the address of a page whose first access never ends; `None` if that is not permitted here. Only a
/// privileged process can make a page that keeps the kernel waiting, too, so a process that becomes another
/// user makes it before.
pub fn page_that_never_comes() -> Option<usize> {
    static PAGE: OnceLock<Option<usize>> = OnceLock::new();
    *PAGE.get_or_init(|| {
        /// `UFFDIO_API` and `UFFDIO_REGISTER`.
        const API: libc::c_ulong = 0xc018_aa3f;
        const REGISTER: libc::c_ulong = 0xc020_aa00;
        const LENGTH: usize = 4096;
        // SAFETY: the mapping is fresh, and nothing but the kernel accesses it; the arrays have the layout
        // that the kernel expects.
        unsafe {
            let page = libc::mmap(
                std::ptr::null_mut(),
                LENGTH,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            let faults = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as libc::c_int;
            let mut api = [0xaa_u64, 0, 0];
            let mut register = [page as u64, LENGTH as u64, 1, 0];
            let made = libc::ioctl(faults, API, api.as_mut_ptr()) == 0
                && libc::ioctl(faults, REGISTER, register.as_mut_ptr()) == 0;
            made.then_some(page as usize)
        }
    })
}

/// Sends for ever: the bytes never come, so the call keeps the lock of a TCP socket.
pub fn send_for_ever(socket: impl AsFd) {
    let page = page_that_never_comes().expect("the right to use userfaultfd");
    // SAFETY: the kernel alone reads the page.
    unsafe { libc::send(socket.as_fd().as_raw_fd(), page as *const libc::c_void, 64, 0) };
}

/// Clears `O_NONBLOCK` of a descriptor, for all processes that share its open file. Returns whether it was
/// set.
pub fn make_blocking(descriptor: RawFd) -> bool {
    // SAFETY: the calls take numbers only.
    unsafe {
        let flags = libc::fcntl(descriptor, libc::F_GETFL);
        let was_set = flags >= 0 && flags & libc::O_NONBLOCK != 0;
        was_set && libc::fcntl(descriptor, libc::F_SETFL, flags & !libc::O_NONBLOCK) == 0
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
