//! Listening sockets of all kinds. The process binds a socket once, and each thread accepts from it.

use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::{fs, io};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio_stream::{Stream as _, StreamExt as _};
use tonic_rdma::{Config, Listener, StockClients};

use super::address::{Address, HostPort, UnixName};
use super::stream::Stream;

/// A bound socket.
#[derive(Debug)]
pub(crate) struct Bound {
    socket: BoundSocket,
    /// The address of the socket, with the port that the kernel chose. It says whether clients may use RDMA.
    address: Address,
    _file: Option<SocketFile>,
}

#[derive(Debug)]
enum BoundSocket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// Clients that may wait for the accept. The system's own limit (`net.core.somaxconn`) may be lower.
const BACKLOG: i32 = 4096;

impl Bound {
    /// Listens on `address`.
    ///
    /// # Errors
    /// The socket can't be bound. The error gives the reason and, if that is known, what to do.
    pub(crate) fn new(address: &Address) -> io::Result<Self> {
        let (mut address, mut file) = (address.clone(), None);
        let socket = match &mut address {
            Address::Tcp(at) | Address::Rdma(at) => BoundSocket::Tcp(bind_tcp(at)?),
            Address::Unix(name) => {
                let socket = match name {
                    UnixName::Path(path) => {
                        let (socket, made) = bind_unix(path)?;
                        file = Some(made);
                        socket
                    }
                    UnixName::Abstract(name) => {
                        UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?
                    }
                };
                socket.set_nonblocking(true)?;
                BoundSocket::Unix(socket)
            }
        };
        Ok(Self { socket, address, _file: file })
    }

    /// Returns the address of the socket.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Returns a handle with which the calling runtime accepts.
    pub(crate) fn acceptor(&self, config: &Config) -> io::Result<Acceptor> {
        let tcp = match &self.socket {
            BoundSocket::Tcp(socket) => tokio::net::TcpListener::from_std(socket.try_clone()?)?,
            BoundSocket::Unix(socket) => {
                return Ok(Acceptor::Unix(tokio::net::UnixListener::from_std(socket.try_clone()?)?));
            }
        };
        if matches!(self.address, Address::Rdma(_)) {
            let config = config.clone().stock_clients(StockClients::Any);
            return Ok(Acceptor::Rdma(Listener::new(tcp, config)?));
        }
        Ok(Acceptor::Tcp(tcp))
    }
}

/// A socket that a runtime accepts from.
#[derive(Debug)]
pub(crate) enum Acceptor {
    Tcp(tokio::net::TcpListener),
    Unix(tokio::net::UnixListener),
    Rdma(Listener),
}

impl Acceptor {
    /// Closes the socket, and resets the clients that were negotiated but not accepted. After an orderly end,
    /// such a client would believe that the server had accepted it. (The system resets the clients in the
    /// backlog.)
    pub(crate) fn close(self) {
        let Self::Rdma(mut listener) = self else { return };
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(stream)) = Pin::new(&mut listener).poll_next(&mut context) {
            stream.abort();
        }
    }

    /// Waits for the next client.
    pub(crate) async fn accept(&mut self) -> io::Result<Stream> {
        match self {
            Self::Tcp(socket) => Stream::tcp(socket.accept().await?.0),
            Self::Unix(socket) => Ok(Stream::unix(socket.accept().await?.0)),
            Self::Rdma(listener) => match listener.next().await {
                Some(stream) => Stream::endpoint(stream),
                None => Err(io::Error::other("the listener has ended")),
            },
        }
    }
}

/// Binds the first address of `at` that can be bound, and sets the port that the kernel chose.
fn bind_tcp(at: &mut HostPort) -> io::Result<TcpListener> {
    let mut last = io::Error::other("the name has no address");
    for address in (at.host.as_str(), at.port).to_socket_addrs()? {
        match bind_address(address) {
            Ok(socket) => {
                at.port = socket.local_addr()?.port();
                return Ok(socket);
            }
            Err(error) => last = explain(error),
        }
    }
    Err(last)
}

fn bind_address(address: std::net::SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(OwnedFd::from(socket).into())
}

fn explain(error: io::Error) -> io::Error {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => "another process listens there; port 0 picks a free one",
        io::ErrorKind::PermissionDenied => "ports below 1024 need CAP_NET_BIND_SERVICE",
        io::ErrorKind::AddrNotAvailable => "no interface of this machine has that address",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}: {advice}"))
}

/// Listens on `path`. Replaces a socket that a killed process left there, and leaves any other file alone.
fn bind_unix(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let socket = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            remove_stale(path)?;
            UnixListener::bind(path)?
        }
        socket => socket?,
    };
    let file = fs::symlink_metadata(path)?;
    Ok((socket, SocketFile { path: path.to_owned(), identity: (file.dev(), file.ino()) }))
}

fn remove_stale(path: &Path) -> io::Result<()> {
    let in_use = |what: &str| Err(io::Error::new(io::ErrorKind::AddrInUse, what));
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return in_use("there is a file of another kind, which is left alone");
    }
    // Does not block: a process that is busy may have a full queue.
    let client = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
    match client.connect(&SockAddr::unix(path)?) {
        Ok(()) => in_use("another process listens there"),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => in_use("another process listens there"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::warn!(path = %path.display(), "replacing a socket that no process listens on");
            fs::remove_file(path)
        }
        Err(error) => Err(io::Error::new(error.kind(), format!("is another process there? {error}"))),
    }
}

/// The file of a Unix socket. The drop removes the file if no other file has its name now.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours =
            fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.identity);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the socket's file can't be removed");
        }
    }
}
