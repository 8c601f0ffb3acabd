//! Counts the system calls of a thread. Before each call the kernel asks a second thread (seccomp's user
//! notification, Linux 5.5), which allows the call and counts it. This needs no privilege and no tool.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;
use std::{io, thread};

/// Calls by which tokio looks at its driver.
#[cfg(target_arch = "x86_64")]
pub(crate) const EPOLL: &[i64] = &[libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];
/// Calls by which tokio looks at its driver.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) const EPOLL: &[i64] = &[libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];

/// Calls that a spinning thread makes, any number of times.
#[cfg(target_arch = "x86_64")]
pub(crate) const WHILE_WAITING: &[i64] =
    &[libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_sched_yield];
/// Calls that a spinning thread makes, any number of times.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) const WHILE_WAITING: &[i64] =
    &[libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_sched_yield];

/// Reads the clock. This is a system call only if user code can not read the kernel's clock.
const CLOCK: i64 = libc::SYS_clock_gettime;

/// More than the largest number of a system call.
const NUMBERS: usize = 1024;

/// The name of the thread that counts.
pub(crate) const SUPERVISOR: &str = "call-counter";

/// Counts the calls of `futex` that wake other threads. The other calls of `futex` have its own number.
pub(crate) const FUTEX_WAKE: i64 = NUMBERS as i64 - 1;

/// The calls of one thread since the start of the count.
#[derive(Debug)]
pub(crate) struct SystemCalls {
    counts: Arc<[AtomicU64; NUMBERS]>,
}

/// The kernel or the container does not permit seccomp. The skip is printed on standard output.
#[derive(Debug)]
pub(crate) struct NotPermitted;

impl SystemCalls {
    /// Counts the calls of the calling thread, and of the threads that it starts from now on, until they end,
    /// except calls with the numbers `uncounted`. Works once for a thread.
    pub(crate) fn count_but(uncounted: &[i64]) -> Result<Self, NotPermitted> {
        let counts: Arc<[AtomicU64; NUMBERS]> = Arc::new([const { AtomicU64::new(0) }; NUMBERS]);
        let listener = Arc::new(AtomicI32::new(WAITING));
        let supervisor = {
            let (counts, listener) = (Arc::clone(&counts), Arc::clone(&listener));
            move || supervise(&listener, &counts)
        };
        thread::Builder::new().name(SUPERVISOR.into()).spawn(supervisor).unwrap();
        // From here on any call waits for that thread, so the descriptor is passed by a store.
        match install(uncounted, &listener) {
            Ok(()) => Ok(Self { counts }),
            Err(error) => {
                println!("skipped: counting system calls: {error}");
                Err(NotPermitted)
            }
        }
    }

    /// Returns the calls so far, by number.
    pub(crate) fn so_far(&self) -> BTreeMap<i64, u64> {
        let counts = self.counts.iter().enumerate();
        let counts = counts.map(|(call, count)| (call as i64, count.load(Ordering::SeqCst)));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

/// Returns the calls with their names.
pub(crate) fn describe(calls: &BTreeMap<i64, u64>) -> String {
    if calls.is_empty() {
        return "no system calls".to_owned();
    }
    let name = |call: i64| match call {
        call if EPOLL.contains(&call) => "epoll_wait".to_owned(),
        libc::SYS_read => "read".to_owned(),
        libc::SYS_write => "write".to_owned(),
        libc::SYS_futex => "futex".to_owned(),
        FUTEX_WAKE => "futex to wake".to_owned(),
        libc::SYS_sendto => "sendto".to_owned(),
        libc::SYS_sched_yield => "sched_yield".to_owned(),
        libc::SYS_mmap => "mmap".to_owned(),
        libc::SYS_munmap => "munmap".to_owned(),
        libc::SYS_madvise => "madvise".to_owned(),
        libc::SYS_recvfrom => "recvfrom".to_owned(),
        libc::SYS_process_vm_readv => "process_vm_readv".to_owned(),
        libc::SYS_process_vm_writev => "process_vm_writev".to_owned(),
        other => format!("system call {other}"),
    };
    calls.iter().map(|(call, count)| format!("{} × {count}", name(*call))).collect::<Vec<_>>().join(", ")
}

const WAITING: i32 = -1;
const FAILED: i32 = -2;

/// Installs the filter on this thread, and stores the descriptor of its listener.
fn install(uncounted: &[i64], listener: &AtomicI32) -> io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    // The number of the call is the first word of the filter's input.
    let mut program = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for call in uncounted.iter().chain(&[CLOCK]) {
        let jump = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        program.push(libc::sock_filter { code: jump, jt: 0, jf: 1, k: *call as u32 });
        program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    }
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_USER_NOTIF));
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY:
    // - the first call takes only numbers and affects only this thread, and
    // - the second call reads the program, which outlives the call.
    let descriptor = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    let error = io::Error::last_os_error();
    listener.store(if descriptor < 0 { FAILED } else { descriptor as i32 }, Ordering::SeqCst);
    if descriptor < 0 { Err(error) } else { Ok(()) }
}

/// Allows every call, and counts it, until the thread has ended.
fn supervise(listener: &AtomicI32, counts: &[AtomicU64; NUMBERS]) {
    let listener = loop {
        match listener.load(Ordering::SeqCst) {
            WAITING => thread::sleep(Duration::from_millis(1)),
            FAILED => return,
            // SAFETY: the descriptor was just made, and has no other owner.
            descriptor => break unsafe { OwnedFd::from_raw_fd(descriptor) },
        }
    };
    /// The bits of the operation without its flags.
    const FUTEX_COMMAND: i32 = !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
    while wait(&listener) {
        // SAFETY: the all-zero value is valid, and the kernel demands it.
        let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one notification.
        if unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut asked) } != 0 {
            continue;
        }
        let number = match i64::from(asked.data.nr) {
            libc::SYS_futex if asked.data.args[1] as i32 & FUTEX_COMMAND == libc::FUTEX_WAKE => FUTEX_WAKE,
            number => number,
        };
        if let Some(count) = counts.get(number as usize) {
            count.fetch_add(1, Ordering::SeqCst);
        }
        let flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        let mut answer = libc::seccomp_notif_resp { id: asked.id, val: 0, error: 0, flags };
        // SAFETY: the kernel reads one answer.
        unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) };
    }
}

/// Waits for a call. Returns false after the end of the thread.
fn wait(listener: &OwnedFd) -> bool {
    let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer points to one entry, and the count is 1.
    unsafe { libc::poll(&raw mut poll, 1, -1) };
    poll.revents & libc::POLLHUP == 0
}

#[test]
fn system_calls_are_counted() {
    let counted = thread::spawn(|| {
        let calls = SystemCalls::count_but(&[libc::SYS_sched_yield])?;
        (0..10).for_each(|_| rustix::thread::sched_yield());
        (0..7).for_each(|_| _ = rustix::thread::sched_getaffinity(None));
        Ok::<_, NotPermitted>(calls.so_far())
    });
    let Ok(calls) = counted.join().unwrap() else { return };
    assert_eq!(calls.get(&libc::SYS_sched_getaffinity), Some(&7), "{}", describe(&calls));
    assert_eq!(calls.get(&libc::SYS_sched_yield), None);
}
