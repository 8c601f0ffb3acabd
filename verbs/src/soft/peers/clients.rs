//! The processes that are connected to this device's socket, the bounds on their number, and the queue pairs
//! of this process as such processes and the device's thread reach them.
//!
//! A connection is *proven* while a queue pair of this process stands for it: the last one of those that have
//! named this queue pair and its token. So there are not more proven connections than queue pairs, and no
//! process takes a slot from others by them. The number of unproven connections is bounded: a process that
//! leaves very many unproven loses its own ones.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::level::{Identity, Level};
use super::message::{Address, Answer, Object};
use super::received::Socket;
use super::segments::Segments;
use crate::soft::events::EventEnd;
use crate::soft::shared::attention::Watch;
use crate::soft::shared::end::EndState;

/// Largest number of unproven connections. A device proves each connection with its first request.
const UNPROVEN: usize = 128;
/// Number of connections beyond the proven and the unproven ones, at which those of queue pairs that are gone
/// are removed.
const STALE: usize = 64;

/// A connection.
#[derive(Debug)]
pub(crate) struct Client {
    /// An answer that waits may refer to the socket, too.
    pub(crate) socket: Arc<Socket>,
    pub(crate) memory: ClientMemory,
    identity: Identity,
    /// Number of the queue pairs that stand for this connection.
    proofs: usize,
}

impl Client {
    /// Lets the client, which has just named a queue pair and its token, send descriptors of memory. Before,
    /// and for untrusted peers, the kernel refuses them.
    pub(crate) fn take_descriptors(&self) {
        if self.memory.is_shared && self.proofs == 0 {
            self.socket.take_descriptors();
        }
    }
}

/// The origin of a connection: the user and the process number. The number is 0 for all processes of other
/// pid namespaces.
type Source = (u32, i32);

/// All connections, by token. Later connections have greater tokens.
#[derive(Debug)]
pub(crate) struct Clients {
    clients: BTreeMap<u64, Client>,
    /// For each queue pair that was named with its token, the connection that did so last.
    proofs: HashMap<u32, u64>,
    /// Numbers of proofs, and of connections, at which the proofs by queue pairs that are gone are removed.
    prune_at: [usize; 2],
    unproven: usize,
}

impl Default for Clients {
    fn default() -> Self {
        Self {
            clients: BTreeMap::new(),
            proofs: HashMap::new(),
            prune_at: [64, UNPROVEN + STALE],
            unproven: UNPROVEN,
        }
    }
}

impl Clients {
    pub(crate) fn get(&self, token: u64) -> Option<&Client> {
        self.clients.get(&token)
    }

    pub(crate) fn remove(&mut self, token: u64) {
        self.clients.remove(&token);
    }

    /// Notes that a connection has named the queue pair `number` and its token. Returns whether
    /// [`prune`](Self::prune) is due.
    pub(crate) fn prove(&mut self, token: u64, number: u32) -> bool {
        let before = self.proofs.insert(number, token);
        if before != Some(token) {
            self.disprove(before);
            if let Some(client) = self.clients.get_mut(&token) {
                client.proofs += 1;
            }
        }
        self.proofs.len() >= self.prune_at[0]
    }

    /// Returns whether there are so many connections that [`prune`](Self::prune) is due.
    pub(crate) fn are_many(&self) -> bool {
        self.clients.len() >= self.prune_at[1]
    }

    /// Removes the proofs by queue pairs that are not in `live`.
    pub(crate) fn prune<T>(&mut self, live: &HashMap<u32, T>) {
        let mut proofs = std::mem::take(&mut self.proofs);
        proofs.retain(|number, token| {
            let stays = live.contains_key(number);
            if !stays {
                self.disprove(Some(*token));
            }
            stays
        });
        self.prune_at = [2 * proofs.len() + 64, proofs.len() + UNPROVEN + STALE];
        self.proofs = proofs;
    }

    fn disprove(&mut self, token: Option<u64>) {
        if let Some(client) = token.and_then(|token| self.clients.get_mut(&token)) {
            client.proofs = client.proofs.saturating_sub(1);
        }
    }

    /// Makes room for one more unproven connection: drops those that have ended, and then, until there is
    /// room, the oldest one of the source that has most of them.
    pub(crate) fn make_room(&mut self) {
        if self.unproven().count() < self.unproven {
            return;
        }
        self.clients.retain(|_, client| client.proofs > 0 || !has_ended(client));
        while self.unproven().count() >= self.unproven {
            let mut sources: HashMap<Source, usize> = HashMap::new();
            for (_, client) in self.unproven() {
                *sources.entry(source(&client.identity)).or_default() += 1;
            }
            let most = sources.into_iter().max_by_key(|(_, count)| *count).map(|(source, _)| source);
            let oldest = self.unproven().find(|(_, client)| Some(source(&client.identity)) == most);
            let Some(client) = oldest.map(|(token, _)| *token).and_then(|token| self.clients.remove(&token))
            else {
                return;
            };
            let Identity { user, process, .. } = client.identity;
            crate::throttled!(
                warn,
                user,
                process,
                "too many connections to the soft device name no queue pair"
            );
        }
    }

    fn unproven(&self) -> impl Iterator<Item = (&u64, &Client)> {
        self.clients.iter().filter(|(_, client)| client.proofs == 0)
    }

    /// Adds a connection. The caller has made room.
    pub(crate) fn insert(&mut self, token: u64, socket: Socket, identity: Identity) {
        let is_shared = identity.level == Level::User;
        let memory = ClientMemory { is_shared, segments: Arc::default(), event_ends: Arc::default() };
        self.clients.insert(token, Client { socket: Arc::new(socket), memory, identity, proofs: 0 });
    }
}

fn source(identity: &Identity) -> Source {
    (identity.user, identity.process)
}

/// Returns whether the other side is closed.
fn has_ended(client: &Client) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(client.socket.as_fd(), PollFlags::RDHUP)];
    let ended = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    rustix::event::poll(&mut polled, Some(&Timespec::default())).is_ok()
        && polled[0].revents().intersects(ended)
}

/// A function that sends an answer and its descriptor to a peer.
pub(crate) type SendAnswer<'a> = dyn FnMut(Answer, &[BorrowedFd<'_>]) -> io::Result<()> + 'a;

/// The memory that this process and a client share.
#[derive(Clone, Debug)]
pub(crate) struct ClientMemory {
    /// Whether this process lets the client map its memory for reading.
    pub(crate) is_shared: bool,
    /// The segments of the client that this process has mapped.
    pub(crate) segments: Arc<Segments>,
    /// Our ends of the sockets by which the client wakes pollers of this process.
    pub(crate) event_ends: Arc<Mutex<Vec<EventEnd>>>,
}

/// A queue pair of this process, as its device uses it. The service answers requests for its objects, and
/// rings it at deadlines. The death of its peer moves the queue pair to Error.
pub(crate) trait ServedQueuePair: Any + Debug + Send + Sync {
    /// Returns the number, which is unique within the device.
    fn number(&self) -> u32;

    /// Returns the secret that a peer must know to ask for anything.
    fn token(&self) -> u64;

    /// Returns the address and the state of the queue pair of the peer that this one is connected to.
    fn peer_address(&self) -> Option<(Address, EndState)>;

    /// Sends `object` to the process `client` with `send`, if this queue pair may share the object. Returns
    /// what `send` returned.
    fn grant(
        &self,
        object: Object,
        client: &ClientMemory,
        send: &mut SendAnswer<'_>,
    ) -> Option<io::Result<()>>;

    /// Takes over a connection by which the peer wakes the poller of the completion queue `id`, if the peer
    /// may have one.
    fn add_event_socket(&self, id: u64, socket: &Arc<Socket>) -> Option<io::Result<()>>;

    /// Sends the peer `news` about its segments.
    fn confirm(&self, news: Object);

    /// Takes `news` of the peer about the segments that this process has offered.
    fn take_news(&self, news: Object);

    /// Wakes the pollers of this queue pair's completion queues, if they sleep.
    fn notify(&self);

    /// Carries out the records of the peer, because no thread polls. Returns true if there are more.
    fn carry_out(&self) -> bool;

    /// Checks whether the peer takes the records of this queue pair. Returns how often to check from now on.
    fn watch(&self) -> Watch;

    /// Notes that the peer died.
    fn fail(&self);

    /// Waits until no thread of this process uses memory for this queue pair that was found registered before
    /// this call. Threads only copy between memory, and never wait for a peer, while they use it.
    fn wait_for_own_threads(&self);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::os::unix::net::UnixStream;

    use super::*;

    fn clients(unproven: usize) -> Clients {
        Clients { unproven, ..Clients::default() }
    }

    /// A process of `user`. The number 0 stands for all processes of other containers.
    fn of(user: u32, process: i32) -> Identity {
        Identity { process, user, same_user: user == 7, level: Level::Untrusted }
    }

    /// Connects. Returns the other side.
    fn connect(clients: &mut Clients, token: u64, identity: Identity) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        clients.make_room();
        clients.insert(token, Socket::new(ours.into()), identity);
        theirs
    }

    fn tokens(clients: &Clients) -> Vec<u64> {
        clients.clients.keys().copied().collect()
    }

    #[test]
    fn a_process_takes_no_place_from_others() {
        let mut clients = clients(3);
        let mut open: Vec<_> = (0..3).map(|token| connect(&mut clients, token, of(7, 1))).collect();
        open.push(connect(&mut clients, 3, of(7, 2)));
        assert_eq!(tokens(&clients), [1, 2, 3]);
        // A connection that has ended makes room, even if its end was not noticed yet.
        drop(open.remove(2));
        open.push(connect(&mut clients, 4, of(7, 3)));
        assert_eq!(tokens(&clients), [1, 3, 4]);
    }

    #[test]
    fn the_source_of_most_unproven_connections_loses_one() {
        let mut clients = clients(5);
        let mut open = Vec::new();
        for (token, process) in (0..).zip([3, 1, 1, 1, 2]) {
            open.push(connect(&mut clients, token, of(7, process)));
        }
        open.push(connect(&mut clients, 5, of(7, 4)));
        assert_eq!(tokens(&clients), [0, 2, 3, 4, 5]);
        clients.make_room();
        assert_eq!(tokens(&clients), [0, 3, 4, 5]);
    }

    #[test]
    fn connections_whose_queue_pairs_have_ended_are_bounded() {
        let mut clients = clients(5);
        let mut open = Vec::new();
        for token in 0..20 {
            open.push(connect(&mut clients, token, of(7, 1)));
            clients.prove(token, token as u32);
        }
        clients.prune(&HashMap::from([(3, ())]));
        open.push(connect(&mut clients, 20, of(8, 1)));
        assert_eq!(tokens(&clients), [3, 16, 17, 18, 19, 20]);
    }

    /// A container with 1024 queue pairs holds 1024 connections. Other containers find room nevertheless,
    /// also those whose processes the kernel does not tell from it, because they have its user number.
    #[test]
    fn proven_connections_keep_no_other_container_out() {
        let mut clients = Clients::default();
        let mut open = Vec::new();
        for token in 0..1024 {
            open.push(connect(&mut clients, token, of(7, 0)));
            clients.prove(token, token as u32);
        }
        for (token, user) in (1024..).zip([7, 8, 9]) {
            open.push(connect(&mut clients, token, of(user, 0)));
            clients.prove(token, token as u32);
        }
        // Connections of one container that it does not prove take no slot of those that are proven.
        for token in 2000..3000 {
            open.push(connect(&mut clients, token, of(7, 0)));
        }
        let tokens = tokens(&clients);
        assert!(tokens.starts_with(&(0..1027).collect::<Vec<_>>()));
        assert_eq!(tokens.len(), 1027 + UNPROVEN);
    }

    #[test]
    fn a_queue_pair_stands_for_one_connection() {
        let mut clients = clients(2);
        let mut open: Vec<_> = (0..2).map(|token| connect(&mut clients, token, of(7, 1))).collect();
        clients.prove(0, 5);
        clients.prove(0, 5);
        clients.prove(1, 5);
        let proofs =
            |clients: &Clients| clients.clients.values().map(|client| client.proofs).collect::<Vec<_>>();
        assert_eq!(proofs(&clients), [0, 1]);
        clients.prove(0, 6);
        assert_eq!(proofs(&clients), [1, 1]);
        // The queue pair 5 is gone.
        clients.prune(&HashMap::from([(6, ())]));
        assert_eq!(proofs(&clients), [1, 0]);
        open.push(connect(&mut clients, 2, of(7, 2)));
        open.push(connect(&mut clients, 3, of(7, 2)));
        assert_eq!(tokens(&clients).len(), 3);
        // A connection that is gone leaves its proofs to the next one.
        clients.remove(0);
        clients.prove(3, 6);
        assert_eq!(clients.get(3).unwrap().proofs, 1);
    }

    /// A connection that lives forever, of queue pairs that come and go.
    #[test]
    fn proofs_of_queue_pairs_that_are_gone_are_forgotten() {
        let mut clients = clients(2);
        let _open = connect(&mut clients, 0, of(7, 1));
        for number in 0..100_000 {
            if clients.prove(0, number) {
                clients.prune(&HashMap::from([(number, ())]));
            }
        }
        assert!(clients.proofs.len() <= 66 && clients.get(0).unwrap().proofs == clients.proofs.len());
    }
}
