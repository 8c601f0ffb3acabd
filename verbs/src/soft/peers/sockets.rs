//! The sockets by which devices find one another: files of a directory (`RDMA_SOFT_DIR`), or names in the
//! abstract socket namespace, which belongs to the network namespace.
//!
//! A directory can be shared by containers. Its permissions decide which processes reach a device; the policy
//! ([`Policy`]) decides whether the device lets them in.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fmt, fs, io};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::level::{Identity, Policy};
use super::message::DeviceId;
use super::received::{Socket, hang_up};
use crate::VerbsError;
use crate::soft::forked::{self, Origin};
use crate::soft::{closer, system};

/// The variable that names the directory.
const VARIABLE: &str = "RDMA_SOFT_DIR";
/// Beginning of the names of the sockets in a directory. The device's nonce follows, in hexadecimal digits.
const PREFIX: &str = "tonic-rdma-";
/// Bytes of the name of a socket.
const NAME: usize = PREFIX.len() + 16;
/// Bytes of the path of a socket that the kernel takes, without the zero byte at the end.
const LONGEST_PATH: usize = 107;
/// Age from which a socket may belong to a dead process. A younger one may belong to a process that does not
/// listen yet.
const SETTLED: Duration = Duration::from_secs(60);
/// Most sockets of other devices that are checked when a device opens.
const PROBES: usize = 64;
/// Most files of the directory that are read when a device opens.
const FILES: usize = 4096;
const BACKLOG: i32 = 128;
/// Longest time for which a device's backlog may be full. Whose device it is, is unknown until it has
/// accepted.
const CROWDED: Duration = Duration::from_secs(1);

/// The location of the sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Sockets {
    /// The abstract socket namespace.
    Namespace,
    /// A directory: the absolute path, and the identity of the directory. See [`DeviceId::directory`].
    Directory { path: PathBuf, identity: u64 },
}

/// A socket that listens, and its file, if it has one.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Taken when this value is dropped.
    socket: Option<OwnedFd>,
    file: Option<PathBuf>,
    origin: Origin,
}

impl Sockets {
    /// Reads the location from the value of `RDMA_SOFT_DIR`. Fails if the directory can't be used.
    pub(crate) fn new(directory: Option<&OsStr>) -> Result<Self, VerbsError> {
        let Some(value) = directory else { return Ok(Self::Namespace) };
        let unusable = |reason: &str| VerbsError::unusable(format!("{VARIABLE}={value:?}: {reason}"));
        if !Path::new(value).is_absolute() {
            return Err(unusable("takes the absolute path of a directory"));
        }
        let os =
            |error: io::Error| VerbsError::os(format!("{VARIABLE}={value:?}: using the directory"), error);
        // The path stays right if a link in it changes later.
        let path = fs::canonicalize(value).map_err(os)?;
        let directory = fs::metadata(&path).map_err(os)?;
        if !directory.is_dir() {
            return Err(unusable("is not a directory"));
        }
        let (length, longest) = (path.as_os_str().len(), LONGEST_PATH - NAME - 1);
        if length > longest {
            return Err(unusable(&format!(
                "the path has {length} bytes, and the name of a unix socket leaves room for {longest}: take a shorter path"
            )));
        }
        let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
        rustix::fs::accessat(rustix::fs::CWD, &path, access, AtFlags::EACCESS).map_err(|error| {
            VerbsError::os(
                format!("{VARIABLE}={value:?}: this process must be able to write to the directory"),
                error,
            )
        })?;
        let identity = (directory.dev().rotate_left(32) ^ directory.ino()).max(1);
        Ok(Self::Directory { path, identity })
    }

    /// Returns the number of the directory for a [`DeviceId`].
    pub(crate) fn identity(&self) -> u64 {
        match self {
            Self::Namespace => 0,
            Self::Directory { identity, .. } => *identity,
        }
    }

    /// Listens under the name of `device`. Removes sockets of dead processes from the directory.
    pub(crate) fn listen(
        &self,
        device: DeviceId,
        policy: Policy,
        origin: Origin,
    ) -> Result<Listener, VerbsError> {
        match self {
            Self::Namespace => listen_in_namespace(device, origin)
                .map_err(|error| VerbsError::os("listening for peers of the soft device", error)),
            Self::Directory { path, .. } => {
                remove_dead(path, SETTLED);
                let file = path.join(file_name(device));
                listen_at(&file, policy, origin).map_err(|error| {
                    VerbsError::os(format!("{VARIABLE}: making the socket {}", file.display()), error)
                })
            }
        }
    }

    /// Connects to `device` until `deadline`. Fails with the reason if the two devices do not find one
    /// another, or if `policy` does not let in the device.
    pub(crate) fn connect(
        &self,
        device: DeviceId,
        policy: Policy,
        deadline: Instant,
    ) -> Result<Socket, VerbsError> {
        let os = |error: io::Error| VerbsError::os("connecting to the peer's soft device", error);
        let mut file = None;
        let name = match self {
            Self::Namespace if device.directory != 0 => return Err(self.unseen(device)),
            Self::Namespace => SocketAddrUnix::new_abstract_name(device.socket_name().as_bytes()),
            Self::Directory { .. } if device.directory == 0 => return Err(self.unseen(device)),
            Self::Directory { path, .. } => match SocketFile::open(&path.join(file_name(device))) {
                Ok(found) => file.insert(found).name(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(self.unseen(device)),
                Err(error) => return Err(os(error)),
            },
        };
        let name = name.map_err(|error| os(error.into()))?;
        let socket = Socket::new(new_socket().map_err(|error| os(error.into()))?);
        let crowded = deadline.min(Instant::now() + CROWDED);
        loop {
            match rustix::net::connect(&socket, &name) {
                Ok(()) => return Ok(socket),
                // The listener's backlog is full, because its service thread is busy. A process that is not
                // let in may have made the listener, and never accept.
                Err(Errno::AGAIN) if Instant::now() < crowded => {
                    if let Some(file) = &file {
                        policy.admit(&Identity::of_owner(file.owner))?;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(Errno::AGAIN) => {
                    let busy = "the peer's soft device accepts no connection";
                    return Err(os(io::Error::new(io::ErrorKind::TimedOut, busy)));
                }
                Err(Errno::CONNREFUSED | Errno::NOENT) => return Err(self.unseen(device)),
                Err(Errno::ACCESS) => {
                    return Err(VerbsError::not_admitted(
                        "the peer's soft device lets in only its own user (its RDMA_SOFT_PEERS is not any), and this process \
                         runs as another one: set RDMA_SOFT_PEERS=any at both ends",
                    ));
                }
                Err(error) => return Err(os(error.into())),
            }
        }
    }

    /// Returns the reason why there is no socket of `device` here.
    fn unseen(&self, device: DeviceId) -> VerbsError {
        const ADVICE: &str = "set RDMA_SOFT_DIR to one directory at both ends";
        VerbsError::unreachable(match self {
            Self::Namespace if device.directory == 0 => format!(
                "no such soft device here: the peer is on another host, in another network namespace, or gone; \
                 between network namespaces {ADVICE}"
            ),
            Self::Namespace => format!(
                "the peer's soft device is found through a directory (its RDMA_SOFT_DIR), and this process has no \
                 RDMA_SOFT_DIR: {ADVICE}"
            ),
            Self::Directory { path, .. } if device.directory == 0 => format!(
                "this process finds soft devices through the directory {} (RDMA_SOFT_DIR), and the peer has no \
                 RDMA_SOFT_DIR: {ADVICE}",
                path.display()
            ),
            Self::Directory { path, identity } if device.directory != *identity => format!(
                "this process finds soft devices through the directory {} (RDMA_SOFT_DIR), and the peer's RDMA_SOFT_DIR is \
                 another directory: {ADVICE}",
                path.display()
            ),
            Self::Directory { path, .. } => format!(
                "the peer's soft device has no socket in {} (RDMA_SOFT_DIR): the peer is gone, or the file was removed",
                path.display()
            ),
        })
    }
}

impl fmt::Display for Sockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Namespace => write!(f, "the network namespace of this process"),
            Self::Directory { path, identity } => {
                write!(f, "the directory {} (number {identity:#x})", path.display())
            }
        }
    }
}

/// The file of a device's socket. Other processes may write to the directory, so the name may be that of
/// another file the next time, or of a link to one on a file system that does not answer. Therefore the file
/// is found once, and no link is followed.
struct SocketFile {
    handle: OwnedFd,
    /// The user.
    owner: u32,
}

impl SocketFile {
    fn open(file: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let handle = rustix::fs::open(file, flags, Mode::empty())?;
        let status = rustix::fs::fstat(&handle)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::Socket {
            return Err(io::Error::other("another process has replaced the file"));
        }
        Ok(Self { handle, owner: status.st_uid })
    }

    /// Returns another path of the file, which goes through no directory that others can write to.
    fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.handle.as_raw_fd())
    }

    fn name(&self) -> Result<SocketAddrUnix, Errno> {
        SocketAddrUnix::new(self.path())
    }
}

impl Listener {
    fn new(socket: OwnedFd, file: Option<PathBuf>, origin: Origin) -> Self {
        forked::keep_from_children(&socket);
        Self { socket: Some(socket), file, origin }
    }

    pub(crate) fn socket(&self) -> &OwnedFd {
        // Only `drop` takes the socket.
        self.socket.as_ref().unwrap_or_else(|| unreachable!())
    }

    /// Ends listening, and removes the file. In a forked child, it does nothing: the socket and the file are
    /// the parent's.
    pub(crate) fn remove(&self) {
        if self.origin.is_forked() {
            return;
        }
        hang_up(self.socket());
        if let Some(file) = &self.file {
            // Another process may have removed the file.
            let _ = fs::remove_file(file);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.remove();
        if let Some(socket) = self.socket.take() {
            forked::leave_to_children(&socket);
            // Connections that were not accepted may have messages with descriptors. A forked child has
            // another file instead of the socket.
            if !self.origin.is_forked() {
                closer::close(socket, None);
            }
        }
    }
}

/// Returns the name of the device's socket in a directory. Processes of several pid namespaces may share the
/// directory, so the name has no process number.
fn file_name(device: DeviceId) -> String {
    format!("{PREFIX}{:016x}", device.nonce)
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Makes a socket whose clients can't send descriptors at first. See [`Client`](super::clients::Client).
fn new_listener() -> Result<OwnedFd, Errno> {
    let socket = new_socket()?;
    system::pass_descriptors(&socket, false);
    Ok(socket)
}

fn listen_in_namespace(device: DeviceId, origin: Origin) -> io::Result<Listener> {
    let socket = new_listener()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(device.socket_name().as_bytes())?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(Listener::new(socket, None, origin))
}

fn listen_at(file: &Path, policy: Policy, origin: Origin) -> io::Result<Listener> {
    let socket = new_listener()?;
    // The file gets the socket's mode, less the bits of the process's umask.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(policy.file_mode()))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(file)?)?;
    // From here on, an error drops the listener, which removes the file.
    let listener = Listener::new(socket, Some(file.to_owned()), origin);
    if policy == Policy::Any {
        open_to_all(file, policy)?;
    }
    rustix::net::listen(listener.socket(), BACKLOG)?;
    Ok(listener)
}

/// Gives the socket `file` the mode of `policy`, whatever the umask is. Changes only a socket of this user.
fn open_to_all(file: &Path, policy: Policy) -> io::Result<()> {
    let file = SocketFile::open(file)?;
    if file.owner != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("another process has replaced the file"));
    }
    rustix::fs::chmod(file.path(), Mode::from_raw_mode(policy.file_mode()))?;
    Ok(())
}

/// Removes the sockets of dead processes that are older than `settled` from `directory`. Touches only files
/// with the names of sockets of devices. Does a bounded amount of work, so some may stay until the next
/// device opens.
fn remove_dead(directory: &Path, settled: Duration) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let named = entries.take(FILES).flatten().filter(|entry| is_file_name(&entry.file_name()));
    let old = named.map(|entry| entry.path()).filter(|path| is_old_socket(path, settled));
    for path in old.take(PROBES) {
        if is_dead(&path) && fs::remove_file(&path).is_ok() {
            tracing::debug!(file = %path.display(), "removed the socket of a dead process");
        }
    }
}

fn is_file_name(name: &OsStr) -> bool {
    name.len() == NAME
        && name.as_bytes().strip_prefix(PREFIX.as_bytes()).is_some_and(|nonce| {
            nonce.iter().all(|digit| digit.is_ascii_digit() || (b'a'..=b'f').contains(digit))
        })
}

fn is_old_socket(path: &Path, settled: Duration) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| {
        let age = file.modified().ok().and_then(|made| made.elapsed().ok());
        file.file_type().is_socket() && age.is_some_and(|age| age >= settled)
    })
}

/// Returns whether no process listens at the socket `path`.
fn is_dead(path: &Path) -> bool {
    let (Ok(file), Ok(socket)) = (SocketFile::open(path), new_socket()) else { return false };
    // The listener may send descriptors if it accepts, and a socket closes those that it has.
    let socket = Socket::new(socket);
    file.name().is_ok_and(|name| rustix::net::connect(&socket, &name) == Err(Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests;
