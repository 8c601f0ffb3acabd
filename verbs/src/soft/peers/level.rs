//! Which processes a device lets in (`RDMA_SOFT_PEERS`), and how far this process trusts a peer: the level of
//! a peer, from what the kernel says of the process at the other side of a socket.
//!
//! A peer of this user has the same user in the same user namespace, and this process's pid namespace; and it
//! could trace this process, or the user says that its programs may read one another's memory
//! (`RDMA_SOFT_PEERS=trusted-user`). Against such a peer the device protects from faults. Against an
//! untrusted peer it protects from malice: such a peer maps no memory of this application.
//!
//! Whether a peer could trace this process follows from what `ptrace(2)` lists under "Ptrace access mode
//! checking", and can be seen from inside: dumpable, Yama, users, groups and capabilities. Where the kernel
//! permits more to a peer, such as to one that has `CAP_SYS_PTRACE` or is the parent, the peer is untrusted
//! nevertheless. A module that confines the peer, such as SELinux or AppArmor, and a filter of system calls
//! can't be seen.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::DumpableBehavior;

use crate::VerbsError;
use crate::soft::system;

/// The file that says which processes may trace one another. It is there if the kernel has Yama, as Ubuntu's
/// has.
pub(crate) const YAMA: &str = "/proc/sys/kernel/yama/ptrace_scope";

/// How far this process trusts a peer. A connection is as strict as the stricter end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// A process of the same user, user namespace and pid namespace that could trace this one, or that the
    /// user trusts.
    User,
    /// Any other process, such as one of another container.
    Untrusted,
}

/// The process at the other side of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Its process number in this pid namespace; 0 if it has none here. For messages only: another process
    /// may get the number later.
    pub(crate) process: i32,
    /// Its effective user, as this user namespace numbers it.
    pub(crate) user: u32,
    /// Whether `user` is the effective user of this process. A number that stands for all unknown users is
    /// never that.
    pub(crate) same_user: bool,
    pub(crate) level: Level,
}

impl Identity {
    /// Returns the identity of a process of which only the user is known.
    pub(crate) fn of_owner(user: u32) -> Self {
        let same_user = user == rustix::process::geteuid().as_raw() && !stands_for_unknown(user);
        Self { process: 0, user, same_user, level: Level::Untrusted }
    }

    /// Asks the kernel for the process at the other side of `socket`, as it was when it connected or began to
    /// listen. With `trusts_user`, a process of this user need not be able to trace this one.
    pub(crate) fn of(socket: &impl AsFd, trusts_user: bool) -> io::Result<Self> {
        let (process, user) = system::peer_credentials(socket)?;
        let same_user = user == rustix::process::geteuid().as_raw() && !stands_for_unknown(user);
        let is_trusted = same_user
            && process > 0
            && shares_namespaces(process)
            && (trusts_user || could_trace(process))
            && !has_ended(socket);
        let level = if is_trusted { Level::User } else { Level::Untrusted };
        Ok(Self { process, user, same_user, level })
    }
}

/// Returns whether `process`, which is in the namespaces of this process, could trace it, or is this process.
/// Logs the reason if it could not.
fn could_trace(process: i32) -> bool {
    if u32::try_from(process) == Ok(std::process::id()) {
        return true;
    }
    let result = check_traceable(Path::new(YAMA)).and_then(|()| {
        let (ours, theirs) = (Credentials::of("self"), Credentials::of(&process.to_string()));
        if ours.zip(theirs).is_some_and(|(ours, theirs)| ours.could_be_traced_by(&theirs)) {
            return Ok(());
        }
        Err("the process has other users or groups than this one, or does not have all capabilities of this process".into())
    });
    if let Err(reason) = &result {
        crate::throttled!(
            info,
            process,
            reason,
            "a process of this user may not trace this process, so data goes through the ring"
        );
    }
    result.is_ok()
}

/// Fails with the reason if the kernel lets no other process of this user trace this one. `yama` is [`YAMA`].
pub(crate) fn check_traceable(yama: &Path) -> Result<(), String> {
    if rustix::process::dumpable_behavior() != Ok(DumpableBehavior::Dumpable) {
        return Err("this process is not dumpable (PR_SET_DUMPABLE)".into());
    }
    // Without `/proc/sys`, which systemd's `ProcSubset=pid` hides, this process can't tell.
    let shows_settings = yama.ancestors().nth(2).is_some_and(Path::is_dir);
    match fs::read_to_string(yama) {
        Ok(scope) if scope.trim() == "0" => Ok(()),
        Ok(scope) => Err(format!("{} is {}", yama.display(), scope.trim().escape_debug())),
        Err(error) if error.kind() == io::ErrorKind::NotFound && shows_settings => Ok(()),
        Err(error) => Err(format!("{} can't be read: {error}", yama.display())),
    }
}

/// The credentials of a process that decide which processes may trace it.
#[derive(Debug)]
struct Credentials {
    /// The real, effective and saved user, and the same of the group.
    users: [u32; 3],
    groups: [u32; 3],
    /// The permitted capabilities.
    capabilities: u64,
}

impl Credentials {
    /// Reads the credentials of a process of this user namespace: of its first thread.
    fn of(process: &str) -> Option<Self> {
        Self::parse(&read(&format!("/proc/{process}/status"))?)
    }

    /// The kernel escapes newlines in the name of the process, so the process can't make lines of its own.
    fn parse(status: &str) -> Option<Self> {
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name));
        let three = |name| {
            let mut numbers = field(name)?.split_whitespace().map_while(|number| number.parse().ok());
            Some([numbers.next()?, numbers.next()?, numbers.next()?])
        };
        let capabilities = u64::from_str_radix(field("CapPrm:")?.trim(), 16).ok()?;
        Some(Self { users: three("Uid:")?, groups: three("Gid:")?, capabilities })
    }

    fn could_be_traced_by(&self, other: &Self) -> bool {
        self.users.iter().all(|user| *user == other.users[0])
            && self.groups.iter().all(|group| *group == other.groups[0])
            && self.capabilities & !other.capabilities == 0
    }
}

/// Returns whether the kernel shows users by the number `user` that this user namespace does not know. The
/// kernel has one number for all of them.
fn stands_for_unknown(user: u32) -> bool {
    let overflow = read("/proc/sys/kernel/overflowuid").and_then(|text| text.trim().parse().ok());
    // 65534 is the default of Linux.
    user == overflow.unwrap_or(65534) && !knows_all_users()
}

/// Returns whether this user namespace has a number for each user, as the first one has.
fn knows_all_users() -> bool {
    read("/proc/self/uid_map").is_some_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
}

/// Returns whether `process` is in the user namespace and in the pid namespace of this process. False if that
/// can't be read.
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

/// Returns whether the process at the other side has ended, so that another process may have its number.
/// False if the kernel can't say (Linux before 6.5).
fn has_ended(socket: &impl AsFd) -> bool {
    system::peer_process(socket).is_ok_and(|process| {
        rustix::event::poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&Timespec::default())) != Ok(0)
    })
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// The variable that names the policy.
const VARIABLE: &str = "RDMA_SOFT_PEERS";

/// The processes that a device lets in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Processes of this user.
    #[default]
    User,
    /// Processes of this user, which may read the memory of this process even if the kernel does not let them
    /// trace it.
    TrustedUser,
    /// Every process that can open the device's socket.
    Any,
}

impl Policy {
    /// The values of the variable.
    pub(crate) const VALUES: [(&'static str, Self); 3] =
        [("user", Self::User), ("trusted-user", Self::TrustedUser), ("any", Self::Any)];

    /// Reads the policy from the value of `RDMA_SOFT_PEERS`.
    pub(crate) fn new(value: Option<&OsStr>) -> Result<Self, VerbsError> {
        let Some(value) = value else { return Ok(Self::default()) };
        let known = Self::VALUES.into_iter().find(|(name, _)| value.eq_ignore_ascii_case(name));
        known.map(|(_, policy)| policy).ok_or_else(|| {
            VerbsError::unusable(format!("{VARIABLE}={value:?}: takes one of user, trusted-user, any"))
        })
    }

    /// Returns whether processes of this user may read the memory of this process, whether or not they could
    /// trace it.
    pub(crate) fn trusts_user(self) -> bool {
        self == Self::TrustedUser
    }

    /// Returns the mode of the device's socket, if it is a file.
    pub(crate) fn file_mode(self) -> u32 {
        match self {
            Self::User | Self::TrustedUser => 0o600,
            // The permissions of the directory decide.
            Self::Any => 0o666,
        }
    }

    /// Fails if the device does not let in the process `peer`.
    pub(crate) fn admit(self, peer: &Identity) -> Result<(), VerbsError> {
        if self == Self::Any || peer.same_user {
            return Ok(());
        }
        let (theirs, ours) = (peer.user, rustix::process::geteuid().as_raw());
        let advice = "they share no memory unless both ends set RDMA_SOFT_PEERS=any";
        Err(VerbsError::not_admitted(if theirs == ours {
            format!(
                "the peer's process belongs to a user that this user namespace does not know, as which it shows user {theirs}: {advice}"
            )
        } else {
            format!("the peer's process belongs to user {theirs}, this one to user {ours}: {advice}")
        }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn this_process_is_of_this_user() {
        let (one, _two) = UnixStream::pair().unwrap();
        let identity = Identity::of(&one, true).unwrap();
        assert_eq!(identity.process, std::process::id() as i32);
        assert_eq!(identity.user, rustix::process::geteuid().as_raw());
        assert!(identity.same_user);
        assert_eq!(identity.level, Level::User);
    }

    /// Forks, runs `child` in the child, and returns whether `child` returned `Some(true)`; `None` if `child`
    /// did, because the system does not permit it.
    fn in_child(child: impl FnOnce() -> Option<bool>) -> Option<bool> {
        // SAFETY: the child takes no lock that a thread of this process may hold, apart from those of the C
        // library, which repairs them itself; and the child ends in this function.
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
            let identity = Identity::of(&socket, true).ok()?;
            let alike = identity.user == rustix::process::geteuid().as_raw();
            Some(alike && !identity.same_user && identity.level == Level::Untrusted)
        });
        assert!(skipped(result) || result == Some(true));
    }

    #[test]
    fn this_user_in_another_container_is_untrusted() {
        let (one, _two) = UnixStream::pair().unwrap();
        let socket: std::os::fd::OwnedFd = one.into();
        let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        // In a user namespace of its own, and in this pid namespace.
        let result = in_child(|| {
            unshare(libc::CLONE_NEWUSER)?;
            fs::write("/proc/self/uid_map", format!("7 {user} 1")).ok()?;
            let identity = Identity::of(&socket, true).ok()?;
            Some(identity.user == 7 && identity.same_user && identity.level == Level::Untrusted)
        });
        assert!(skipped(result) || result == Some(true));
        // In a pid namespace of its own, too.
        let result = in_child(|| {
            unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID)?;
            fs::write("/proc/self/uid_map", format!("0 {user} 1")).ok()?;
            fs::write("/proc/self/setgroups", "deny").ok()?;
            fs::write("/proc/self/gid_map", format!("0 {group} 1")).ok()?;
            in_child(|| {
                let identity = Identity::of(&socket, true).ok()?;
                Some(identity.process == 0 && identity.same_user && identity.level == Level::Untrusted)
            })
        });
        assert!(skipped(result) || result == Some(true));
    }

    /// As a program with file capabilities, or one that has changed its user.
    #[test]
    fn a_process_that_is_not_dumpable_has_no_peers_of_its_user() {
        let (one, _two) = UnixStream::pair().unwrap();
        let result = in_child(|| {
            rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).ok()?;
            let reason = check_traceable(Path::new("/none")).err()?;
            let level = |trusts_user| Identity::of(&one, trusts_user).map(|identity| identity.level).ok();
            let strict = reason.contains("not dumpable") && level(false) == Some(Level::Untrusted);
            let (own, _other) = UnixStream::pair().ok()?;
            let itself = Identity::of(&own, false).ok()?.level == Level::User;
            Some(strict && level(true) == Some(Level::User) && itself)
        });
        assert_eq!(result, Some(true));
    }

    #[test]
    fn yama_makes_peers_untrusted() {
        let file = std::env::temp_dir().join(format!("tonic-rdma-yama-{}", std::process::id()));
        assert_eq!(check_traceable(&file), Ok(()), "a kernel without Yama");
        assert!(check_traceable(&file.join("no/settings")).unwrap_err().contains("can't be read"));
        for (content, strict) in [
            ("0\n", false),
            ("1\n", true),
            ("2\n", true),
            ("3\n", true),
            ("", true),
            ("00", true),
            ("no", true),
        ] {
            fs::write(&file, content).unwrap();
            assert_eq!(check_traceable(&file).is_err(), strict, "{content:?}");
        }
        fs::write(&file, "1\n").unwrap();
        assert_eq!(check_traceable(&file).unwrap_err(), format!("{} is 1", file.display()));
        fs::write(&file, [0xff]).unwrap();
        assert!(check_traceable(&file).unwrap_err().contains("can't be read"));
        fs::remove_file(&file).unwrap();
    }

    #[test]
    fn peers_with_other_groups_or_fewer_capabilities_are_untrusted() {
        const STATUS: &str =
            "Name:\ta\\nUid:\t9\t9\t9\t9\nUid:\t7\t7\t7\t7\nGid:\t8\t8\t8\t8\nCapPrm:\t0000000000000003\n";
        let with = |from, to| Credentials::parse(&STATUS.replace(from, to)).unwrap();
        let this = with("", "");
        assert_eq!((this.users, this.groups, this.capabilities), ([7; 3], [8; 3], 3));
        let more = with("0003", "000b");
        assert!(this.could_be_traced_by(&this) && this.could_be_traced_by(&more));
        assert!(!more.could_be_traced_by(&this));
        for (from, to) in [("7\t7\t7", "6\t7\t7"), ("8\t8\t8", "6\t8\t8")] {
            assert!(!this.could_be_traced_by(&with(from, to)), "{to}: the real one counts");
            assert!(!with(from, to).could_be_traced_by(&this));
        }
        for (from, to) in [("7\t7\t7\t7", "7\t7\t6\t7"), ("8\t8\t8", "8\t6\t8")] {
            assert!(this.could_be_traced_by(&with(from, to)));
            assert!(!with(from, to).could_be_traced_by(&this), "{to}: all of this process count");
        }
        for line in ["Uid", "Gid", "CapPrm"] {
            assert!(Credentials::parse(&STATUS.replace(&format!("\n{line}"), "\nNo")).is_none());
        }
        let ours = Credentials::of("self").unwrap();
        assert_eq!(ours.users[1], rustix::process::geteuid().as_raw());
        assert!(Credentials::of("0").is_none());
    }

    #[test]
    fn the_stricter_level_is_the_greater() {
        assert_eq!(Level::User.max(Level::Untrusted), Level::Untrusted);
    }
}
