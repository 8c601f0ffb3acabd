//! A question to the device of a peer for which no thread waits. A server asks a client's device before it spends a thread and
//! memory on the client, because [`to_rtr`](crate::QueuePair::to_rtr) blocks for as long as that device lets it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::{Duration, Instant};

use super::address::{Address, DeviceId};
use super::level::{Identity, Level};
use super::message::{self, Object, Request};
use super::peer::check_owner;
use super::received::Socket;
use crate::soft::reach::Reach;
use crate::{QueuePairAddress, VerbsError};

/// The software device that the address of a queue pair names. It need not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SoftDevice(DeviceId);

/// The user of a device's process, as the kernel states it. One user counts as two owners: its processes that are
/// peers of this user, and its strangers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceOwner {
    user: u32,
    stranger: bool,
}

/// A question under way. Its descriptor is readable when the device has answered or has gone.
#[derive(Debug)]
pub struct Ping {
    socket: Socket,
    owner: DeviceOwner,
}

impl SoftDevice {
    /// The longest time that a device has for its answer: as long as `to_rtr` waits for it.
    pub const PATIENCE: Duration = Duration::from_millis(2500);

    /// Returns the device of the queue pair at `address`.
    ///
    /// # Errors
    /// It is not the address of a software device's queue pair.
    pub fn of(address: &QueuePairAddress) -> Result<Self, VerbsError> {
        Address::decode(address).map(|address| Self(address.device))
    }

    /// Asks the device for an answer. Does not wait. Returns `None` if the device takes no connection now: ask again later.
    ///
    /// # Errors
    /// The device can't be found, or this process does not let in its user.
    pub fn ping(self) -> Result<Option<Ping>, VerbsError> {
        let Reach { sockets, policy } = Reach::from_environment()?;
        let socket = match sockets.connect(self.0, policy, Instant::now()) {
            Ok(socket) => socket,
            // The backlog of the device's socket is full.
            Err(VerbsError::Os { cause, .. })
                if matches!(cause.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let Identity { user, level, .. } = check_owner(&socket, policy)?;
        // No queue pair has the number 0, so the device refuses, which is an answer.
        let request = Request { sequence: 1, number: 0, token: 0, object: Object::Table };
        message::send_request(&socket, &request, None)
            .map_err(|error| VerbsError::os("asking the peer's device", error))?;
        Ok(Some(Ping { socket, owner: DeviceOwner { user, stranger: level == Level::Stranger } }))
    }
}

impl DeviceOwner {
    /// Makes an owner, for tests of what is counted by owners.
    pub fn new(user: u32, stranger: bool) -> Self {
        Self { user, stranger }
    }
}

impl Ping {
    /// Returns the owner of the device.
    pub fn owner(&self) -> DeviceOwner {
        self.owner
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
    use rustix::event::{PollFd, PollFlags};

    use super::*;
    use crate::soft::forked::Origin;
    use crate::soft::peers::policy::Policy;
    use crate::soft::peers::sockets::Sockets;

    fn is_answered(ping: &Ping, patience_ms: i64) -> bool {
        let patience = rustix::event::Timespec { tv_sec: patience_ms / 1000, tv_nsec: 0 };
        let polled = rustix::event::poll(&mut [PollFd::new(&ping.socket, PollFlags::IN)], Some(&patience));
        polled.unwrap() > 0
    }

    #[test]
    fn a_device_answers_and_a_socket_without_a_device_does_not() {
        let context = crate::soft::open().unwrap();
        let device = crate::soft::context::current().unwrap();
        let ping = SoftDevice(device.id()).ping().unwrap().unwrap();
        assert!(is_answered(&ping, 60_000));
        assert_eq!(ping.owner(), DeviceOwner::new(rustix::process::geteuid().as_raw(), false));
        assert_eq!(context.attributes().name, crate::soft::NAME);
        let silent = DeviceId { process: 1, nonce: crate::random::random().unwrap(), directory: 0 };
        assert!(SoftDevice(silent).ping().is_err());
        let _listener = Sockets::Namespace.listen(silent, Policy::User, Origin::here().unwrap()).unwrap();
        let mut pings = Vec::new();
        while let Some(ping) = SoftDevice(silent).ping().unwrap() {
            pings.push(ping);
        }
        assert!(pings.len() > 1 && !is_answered(&pings[0], 0));
    }
}
