//! How far this process trusts a peer: the level of a peer, from what the kernel says of the process at the other end of a
//! socket.
//!
//! A peer of this user could trace this process: it has the same user in the same user namespace, and this process's pid
//! namespace. Against such a peer the device protects from faults. Against a stranger it protects from malice: a stranger maps
//! no memory of this application.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::soft::system;

/// How far this process trusts a peer. A connection is as strict as the stricter end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// The process could trace this one: same user, same user namespace, same pid namespace.
    User,
    /// Any other process, such as one of another container.
    Stranger,
}

/// The process at the other end of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Its process number in this pid namespace; 0 if it has none here. For messages only: another process may get the number
    /// later.
    pub(crate) process: i32,
    /// Its effective user, as this user namespace numbers it.
    pub(crate) user: u32,
    /// Whether `user` is the effective user of this process. A number that stands for all unknown users is never that.
    pub(crate) same_user: bool,
    pub(crate) level: Level,
}

impl Identity {
    /// Asks the kernel for the process at the other end of `socket`, as it was when it connected or began to listen.
    pub(crate) fn of(socket: &impl AsFd) -> io::Result<Self> {
        let (process, user) = system::peer_credentials(socket)?;
        let same_user = user == rustix::process::geteuid().as_raw() && !stands_for_unknown(user);
        let level = if same_user && process > 0 && shares_namespaces(process) && !has_ended(socket) {
            Level::User
        } else {
            Level::Stranger
        };
        Ok(Self { process, user, same_user, level })
    }
}

/// Returns whether the kernel shows users by the number `user` that this user namespace does not know. The kernel has one
/// number for all of them.
fn stands_for_unknown(user: u32) -> bool {
    let overflow = read("/proc/sys/kernel/overflowuid").and_then(|text| text.trim().parse().ok());
    // 65534 is the default of Linux.
    user == overflow.unwrap_or(65534) && !knows_all_users()
}

/// Returns whether this user namespace has a number for each user, as the first one has.
fn knows_all_users() -> bool {
    read("/proc/self/uid_map").is_some_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
}

/// Returns whether `process` is in the user namespace and in the pid namespace of this process. False if that can't be read.
fn shares_namespaces(process: i32) -> bool {
    // `/proc` may belong to another pid namespace, where `process` is another process.
    if fs::read_link("/proc/self").ok() != Some(PathBuf::from(std::process::id().to_string())) {
        return false;
    }
    let other = PathBuf::from(format!("/proc/{process}/ns"));
    ["user", "pid"].into_iter().all(|name| {
        let namespace = |of: &Path| fs::read_link(of.join(name)).ok();
        let ours = namespace(Path::new("/proc/self/ns"));
        ours.is_some() && ours == namespace(&other)
    })
}

/// Returns whether the process at the other end has ended, so that another process may have its number. False if the kernel
/// can't say (Linux before 6.5).
fn has_ended(socket: &impl AsFd) -> bool {
    system::peer_process(socket).is_ok_and(|process| {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&now)) != Ok(0)
    })
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn this_process_is_of_this_user() {
        let (one, _two) = UnixStream::pair().unwrap();
        let identity = Identity::of(&one).unwrap();
        assert_eq!(identity.process, std::process::id() as i32);
        assert_eq!(identity.user, rustix::process::geteuid().as_raw());
        assert!(identity.same_user);
        assert_eq!(identity.level, Level::User);
    }

    /// Forks, runs `child` in the child, and returns whether `child` returned `Some(true)`; `None` if `child` did, because the
    /// system does not permit it.
    fn in_child(child: impl FnOnce() -> Option<bool>) -> Option<bool> {
        // SAFETY: the child takes no lock that a thread of this process may hold, apart from those of the C library, which it
        // looks after itself; and the child ends in this function.
        let process = unsafe { libc::fork() };
        if process == 0 {
            let code = child().map_or(2, |right| i32::from(!right));
            // SAFETY: ends the child without the destructors of the test harness.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: the status is writable.
        assert_eq!(unsafe { libc::waitpid(process, &raw mut status, 0) }, process);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        (libc::WEXITSTATUS(status) != 2).then_some(libc::WEXITSTATUS(status) == 0)
    }

    /// Moves this process, which has one thread, to new namespaces.
    fn unshare(namespaces: libc::c_int) -> Option<()> {
        // SAFETY: changes only this process.
        (unsafe { libc::unshare(namespaces) } == 0).then_some(())
    }

    fn skipped(result: Option<bool>) -> bool {
        if result.is_none() {
            println!("skipped: a new user namespace is not permitted here");
        }
        result.is_none()
    }

    /// In a user namespace without numbers, this process and all others have one number.
    #[test]
    fn users_without_a_number_are_not_this_user() {
        let (one, _two) = UnixStream::pair().unwrap();
        let socket: std::os::fd::OwnedFd = one.into();
        let result = in_child(|| {
            unshare(libc::CLONE_NEWUSER)?;
            let identity = Identity::of(&socket).ok()?;
            let alike = identity.user == rustix::process::geteuid().as_raw();
            Some(alike && !identity.same_user && identity.level == Level::Stranger)
        });
        assert!(skipped(result) || result == Some(true));
    }

    #[test]
    fn this_user_in_another_container_is_a_stranger() {
        let (one, _two) = UnixStream::pair().unwrap();
        let socket: std::os::fd::OwnedFd = one.into();
        let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        // In a user namespace of its own, and in this pid namespace.
        let result = in_child(|| {
            unshare(libc::CLONE_NEWUSER)?;
            fs::write("/proc/self/uid_map", format!("7 {user} 1")).ok()?;
            let identity = Identity::of(&socket).ok()?;
            Some(identity.user == 7 && identity.same_user && identity.level == Level::Stranger)
        });
        assert!(skipped(result) || result == Some(true));
        // In a pid namespace of its own, too.
        let result = in_child(|| {
            unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID)?;
            fs::write("/proc/self/uid_map", format!("0 {user} 1")).ok()?;
            fs::write("/proc/self/setgroups", "deny").ok()?;
            fs::write("/proc/self/gid_map", format!("0 {group} 1")).ok()?;
            in_child(|| {
                let identity = Identity::of(&socket).ok()?;
                Some(identity.process == 0 && identity.same_user && identity.level == Level::Stranger)
            })
        });
        assert!(skipped(result) || result == Some(true));
    }

    #[test]
    fn the_stricter_level_is_the_greater() {
        assert_eq!(Level::User.max(Level::Stranger), Level::Stranger);
    }
}
