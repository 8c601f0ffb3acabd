//! The processes that are connected to this device's socket, and the bounds on their number.
//!
//! A connection is *unproven* until it names a queue pair and its token. A process that opens very many connections, or leaves
//! them unproven, loses its own connections. It takes no place from others.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::level::{Identity, Level};
use super::local::ClientMemory;
use super::received::Received;
use crate::soft::system;

/// The bounds. The defaults are far above what devices need: a device makes one connection to each other device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Connections in all.
    all: usize,
    /// Connections of strangers, so that processes of this user find room.
    strangers: usize,
    /// Connections of one process.
    process: usize,
    /// Connections of the processes of one user that have no number here, because they are in other pid namespaces. The kernel
    /// does not tell them apart.
    unnumbered: usize,
    /// Unproven connections.
    unproven: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { all: 4096, strangers: 3072, process: 32, unnumbered: 1024, unproven: 256 }
    }
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Client {
    /// An answer that waits may refer to the socket, too.
    pub(crate) socket: Arc<Received>,
    pub(crate) memory: ClientMemory,
    identity: Identity,
    proven: bool,
}

impl Client {
    /// Lets the client, which has just named a queue pair and its token, send descriptors of memory. Before, and for strangers, the
    /// kernel refuses them.
    pub(crate) fn take_descriptors(&self) {
        if self.memory.is_shared && !self.proven {
            system::pass_descriptors(&self.socket, true);
        }
    }
}

/// The origin of a connection: the user and the process number.
type Source = (u32, i32);

/// All connections, by token. Later connections have greater tokens.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    bounds: Bounds,
    clients: BTreeMap<u64, Client>,
}

/// The bound that refuses a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the process has the largest number of connections, {0}")]
pub(crate) struct Full(usize);

impl Clients {
    pub(crate) fn get(&self, token: u64) -> Option<&Client> {
        self.clients.get(&token)
    }

    pub(crate) fn remove(&mut self, token: u64) {
        self.clients.remove(&token);
    }

    /// Notes that a client has named a queue pair and its token.
    pub(crate) fn prove(&mut self, token: u64) {
        if let Some(client) = self.clients.get_mut(&token) {
            client.proven = true;
        }
    }

    /// Makes room for a connection of `identity`. At a bound, it drops connections that have ended, or else the oldest unproven
    /// one of the source that has most of them. Fails if there is none.
    pub(crate) fn make_room(&mut self, identity: &Identity) -> Result<(), Full> {
        let bounds = self.bounds;
        let source = source(identity);
        let of_source = if identity.process > 0 { bounds.process } else { bounds.unnumbered };
        self.keep_below(of_source, |client| self::source(&client.identity) == source)?;
        if identity.level == Level::Stranger {
            self.keep_below(bounds.strangers, |client| client.identity.level == Level::Stranger)?;
        }
        self.keep_below(bounds.unproven, |client| !client.proven)?;
        self.keep_below(bounds.all, |_| true)
    }

    /// Adds a connection. The caller has made room.
    pub(crate) fn insert(&mut self, token: u64, socket: Received, identity: Identity) {
        let is_shared = identity.level == Level::User;
        let memory = ClientMemory { is_shared, segments: Arc::default(), event_ends: Arc::default() };
        self.clients.insert(token, Client { socket: Arc::new(socket), memory, identity, proven: false });
    }

    /// Makes sure that fewer than `bound` of the connections that `counts` selects are left.
    fn keep_below(&mut self, bound: usize, counts: impl Fn(&Client) -> bool) -> Result<(), Full> {
        if self.clients.values().filter(|client| counts(client)).count() < bound {
            return Ok(());
        }
        self.clients.retain(|_, client| !(counts(client) && has_ended(client)));
        if self.clients.values().filter(|client| counts(client)).count() < bound {
            return Ok(());
        }
        let unproven = || self.clients.iter().filter(|(_, client)| counts(client) && !client.proven);
        let mut sources: HashMap<Source, usize> = HashMap::new();
        for (_, client) in unproven() {
            *sources.entry(source(&client.identity)).or_default() += 1;
        }
        let most = sources.into_iter().max_by_key(|(_, count)| *count).map(|(source, _)| source);
        let oldest = unproven().find(|(_, client)| Some(source(&client.identity)) == most);
        let token = *oldest.ok_or(Full(bound))?.0;
        self.clients.remove(&token);
        Ok(())
    }
}

fn source(identity: &Identity) -> Source {
    (identity.user, identity.process)
}

/// Returns whether the other end is closed.
fn has_ended(client: &Client) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::from_borrowed_fd(client.socket.as_fd(), PollFlags::RDHUP)];
    let ended = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    rustix::event::poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().intersects(ended)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::os::unix::net::UnixStream;

    use super::*;

    const BOUNDS: Bounds = Bounds { all: 8, strangers: 6, process: 3, unnumbered: 4, unproven: 5 };

    fn clients() -> Clients {
        Clients { bounds: BOUNDS, ..Clients::default() }
    }

    fn of(process: i32) -> Identity {
        Identity { process, user: 7, same_user: true, level: Level::User }
    }

    fn stranger(process: i32) -> Identity {
        Identity { process, user: 8, same_user: false, level: Level::Stranger }
    }

    /// Connects. Returns the other end.
    fn connect(clients: &mut Clients, token: u64, identity: Identity) -> Result<UnixStream, Full> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        clients.make_room(&identity)?;
        clients.insert(token, Received::new(ours.into()), identity);
        Ok(theirs)
    }

    fn tokens(clients: &Clients) -> Vec<u64> {
        clients.clients.keys().copied().collect()
    }

    #[test]
    fn a_process_takes_no_place_from_others() {
        let mut clients = clients();
        let mut open = Vec::new();
        for token in 0..3 {
            open.push(connect(&mut clients, token, of(1)).unwrap());
            clients.prove(token);
        }
        assert_eq!(connect(&mut clients, 3, of(1)).unwrap_err(), Full(3));
        open.push(connect(&mut clients, 4, of(2)).unwrap());
        assert_eq!(tokens(&clients), [0, 1, 2, 4]);
        // A connection that has ended makes room, even if its end was not noticed yet.
        drop(open.remove(1));
        open.push(connect(&mut clients, 5, of(1)).unwrap());
        assert_eq!(tokens(&clients), [0, 2, 4, 5]);
        // A connection without proof makes room for its own process.
        open.push(connect(&mut clients, 6, of(1)).unwrap());
        assert_eq!(tokens(&clients), [0, 2, 4, 6]);
    }

    #[test]
    fn the_source_of_most_unproven_connections_loses_one() {
        let mut clients = clients();
        let mut open = Vec::new();
        for (token, process) in (0..).zip([3, 1, 1, 1, 2]) {
            open.push(connect(&mut clients, token, of(process)).unwrap());
        }
        open.push(connect(&mut clients, 5, of(4)).unwrap());
        assert_eq!(tokens(&clients), [0, 2, 3, 4, 5]);
    }

    #[test]
    fn strangers_leave_room_for_this_user() {
        let mut clients = clients();
        let mut open = Vec::new();
        // Strangers without a number count as one source.
        for token in 0..4 {
            open.push(connect(&mut clients, token, stranger(0)).unwrap());
            clients.prove(token);
        }
        assert_eq!(connect(&mut clients, 4, stranger(0)).unwrap_err(), Full(4));
        for token in 5..7 {
            open.push(connect(&mut clients, token, stranger(token as i32)).unwrap());
            clients.prove(token);
        }
        assert_eq!(connect(&mut clients, 7, stranger(7)).unwrap_err(), Full(6));
        for token in 8..10 {
            open.push(connect(&mut clients, token, of(token as i32)).unwrap());
            clients.prove(token);
        }
        assert_eq!(connect(&mut clients, 10, of(10)).unwrap_err(), Full(8));
    }
}
