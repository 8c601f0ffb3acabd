//! The question to the device of a peer whether a queue pair waits there, for which no thread waits. A server
//! asks it before it spends a thread and memory on a client, because [`to_rtr`](crate::QueuePair::to_rtr)
//! blocks for as long as that device lets it. A positive answer also says whose client it is: the names of
//! devices are public, but only the process with the queue pair gives its secret away.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::{Duration, Instant};

use super::level::{Identity, Level};
use super::message::{self, Address, Answer, DeviceId, Object, Reply, Request};
use super::peer::check_owner;
use super::received::Socket;
use crate::soft::reach::Reach;
use crate::{QueuePairAddress, VerbsError};

/// A software device. It need not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftDevice(DeviceId);

/// A queue pair of a peer's software device, as its address names it. It need not exist.
#[derive(Debug)]
pub struct SoftQueuePair {
    address: Address,
    reach: Reach,
}

/// The user of a device's process, as the kernel states it. One user counts as two owners: its processes that
/// are peers of this user, and its untrusted processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceOwner {
    user: u32,
    untrusted: bool,
}

/// A question under way. Its descriptor is readable when the device has answered or has gone.
#[derive(Debug)]
pub struct Ping {
    socket: Socket,
    owner: DeviceOwner,
}

const ASKING: &str = "asking the peer's device";
/// The number of the only question on a connection.
const SEQUENCE: u64 = 1;

impl SoftQueuePair {
    /// The longest time that a device has for its answer: as long as `to_rtr` waits for it.
    pub const TIMEOUT: Duration = Duration::from_millis(2500);

    /// Returns the queue pair at `address`.
    ///
    /// # Errors
    /// It is not the address of a software device's queue pair, or a variable of the device has a bad value.
    pub fn at(address: &QueuePairAddress) -> Result<Self, VerbsError> {
        Ok(Self { address: Address::decode(address)?, reach: Reach::from_environment()? })
    }

    /// Returns the device that the address names.
    pub fn device(&self) -> SoftDevice {
        SoftDevice(self.address.device)
    }

    /// Asks the device whether the queue pair waits for its peer. Does not wait. Returns `None` if the device
    /// takes no connection now: ask again later.
    ///
    /// # Errors
    /// The device can't be found, or this process does not let in its user.
    pub fn ping(&self) -> Result<Option<Ping>, VerbsError> {
        let Self { address: Address { device, number, token }, reach: Reach { sockets, policy } } = self;
        let is_late = |kind| matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let socket = match sockets.connect(*device, *policy, Instant::now()) {
            Ok(socket) => socket,
            // The backlog of the device's socket is full.
            Err(error) if error.system().is_some_and(|cause| is_late(cause.kind())) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Identity { user, level, .. } = check_owner(&socket, *policy)?;
        let request = Request { sequence: SEQUENCE, number: *number, token: *token, object: Object::Waits };
        message::send_request(&socket, &request, None).map_err(|error| VerbsError::os(ASKING, error))?;
        Ok(Some(Ping { socket, owner: DeviceOwner { user, untrusted: level == Level::Untrusted } }))
    }
}

impl DeviceOwner {
    /// Makes an owner, for tests of what is counted by owners.
    pub fn new(user: u32, untrusted: bool) -> Self {
        Self { user, untrusted }
    }
}

impl Ping {
    /// Returns the owner of the device, if the queue pair waits for its peer there. Does not wait: returns an
    /// error of the kind `WouldBlock` if there is no answer yet.
    ///
    /// # Errors
    /// The device has gone, its answer can't be read, or there is no such queue pair.
    pub fn answer(&self) -> Result<DeviceOwner, io::Error> {
        match message::receive_reply(&self.socket)? {
            (Reply { sequence: SEQUENCE, answer: Answer::Object }, None) => Ok(self.owner),
            (Reply { sequence: SEQUENCE, answer: Answer::Refused }, None) => {
                Err(io::Error::other("no such queue pair waits there for its peer"))
            }
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it sent another answer than was asked for")),
        }
    }
}

impl AsRawFd for Ping {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_fd().as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::os::fd::BorrowedFd;

    use rustix::event::{PollFd, PollFlags};

    use super::*;
    use crate::soft::forked::Origin;
    use crate::soft::peers::level::Policy;
    use crate::soft::peers::sockets::Sockets;

    fn is_answered(ping: &Ping, timeout_ms: i64) -> bool {
        let timeout = rustix::event::Timespec { tv_sec: timeout_ms / 1000, tv_nsec: 0 };
        let polled = rustix::event::poll(&mut [PollFd::new(&ping.socket, PollFlags::IN)], Some(&timeout));
        polled.unwrap() > 0
    }

    fn ping(device: DeviceId) -> Result<Option<Ping>, VerbsError> {
        let address = Address { device, number: 1, token: 2 };
        SoftQueuePair { address, reach: Reach::from_environment().unwrap() }.ping()
    }

    #[test]
    fn a_device_answers_and_a_socket_without_a_device_does_not() {
        let context = crate::soft::open().unwrap();
        let device = crate::soft::context::current().unwrap();
        let asked = ping(device.id).unwrap().unwrap();
        assert!(is_answered(&asked, 60_000));
        assert!(asked.answer().unwrap_err().to_string().contains("no such queue pair"));
        assert_eq!(asked.owner, DeviceOwner::new(rustix::process::geteuid().as_raw(), false));
        assert_eq!(context.attributes().name, crate::soft::NAME);
        let silent = DeviceId { process: 1, nonce: crate::queue_pair::random().unwrap(), directory: 0 };
        assert!(ping(silent).is_err());
        let _listener = Sockets::Namespace.listen(silent, Policy::User, Origin::here().unwrap()).unwrap();
        let mut pings = Vec::new();
        while let Some(ping) = ping(silent).unwrap() {
            pings.push(ping);
        }
        assert!(pings.len() > 1 && !is_answered(&pings[0], 0));
        assert_eq!(pings[0].answer().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    /// The process that has bound the device's socket may answer anything, or hang up.
    #[test]
    fn another_answer_is_none() {
        use crate::soft::peers::received::tests::socket_pair;
        type Play = fn(&std::os::fd::OwnedFd);
        fn reply(socket: &std::os::fd::OwnedFd, sequence: u64, answer: Answer, fds: &[BorrowedFd<'_>]) {
            // The kernel may refuse the descriptor.
            let _ = message::send_reply(socket, &Reply { sequence, answer }, fds);
        }
        let plays: [(bool, Play); 5] = [
            (true, |it| reply(it, SEQUENCE, Answer::Object, &[])),
            (false, |it| reply(it, SEQUENCE, Answer::Object, &[it.as_fd()])),
            (false, |it| reply(it, SEQUENCE + 1, Answer::Object, &[])),
            (false, |it| assert_eq!(rustix::io::write(it, b"no").unwrap(), 2)),
            (false, |_| ()),
        ];
        for (good, play) in plays {
            let (ours, theirs) = socket_pair();
            let ping = Ping { socket: Socket::new(ours), owner: DeviceOwner::new(1, true) };
            play(&theirs);
            drop(theirs);
            assert_eq!(ping.answer().is_ok(), good);
        }
    }
}
