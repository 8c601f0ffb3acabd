//! The set-up of links.
//!
//! ```text
//!   each rank                                              words of the hello, at `Layout::HELLO` of each section
//!     offers its outbox, with a section for each peer        0  magic number and version
//!     attaches the outbox of each peer                       1  slots and inline limit
//!     tries to get a view of it                              2  rank
//!     writes the result into its section for this peer       3  number of its pool of memory
//!     reads the result of the peer                           4  0: nothing yet, 1: it has a view, 2: it has none
//!   both have a view:  messages go by views
//!   otherwise:         each rank offers a ring to the peer, and attaches the peer's ring
//! ```

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic_rdma_tensor::{Channel, RegionView, RemoteRegion, Rights, SharedRegion, TensorError};

use crate::error::{CollectiveError, setup};
use crate::link::remote::RemoteLinks;
use crate::link::remote::element_read::{ElementRead, PeerRegions, Scratch, view_of};
use crate::link::remote::message::{HEADER, Layout, LinkCounters, LinkSettings, REFERENCE};
use crate::link::remote::rank_link::{LinkContext, RankLink, Wire};
use crate::link::remote::wire::{MappedWire, WriteWire};
use crate::memory::MemoryPool;

/// "links", and the version of the format of messages.
const MAGIC: u64 = 0x6c69_6e6b_7300_0003;
/// The words of a hello.
const WORDS: usize = 5;
/// The first and the longest time between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// What one rank writes for another at the start.
#[derive(Clone, Copy)]
struct Hello {
    words: [u64; WORDS],
}

/// What a rank needs to set up a link.
#[derive(Clone)]
struct LinkSetup {
    pool: MemoryPool,
    outbox: SharedRegion,
    names: String,
    settings: LinkSettings,
    rank: usize,
    ranks: usize,
}

impl RemoteLinks {
    /// Opens links to all other ranks, over one channel to each. All ranks call this with the same
    /// generation, settings and number of channels. A group whose members change opens new links with a new
    /// generation. `pool` is the memory of the references that this rank sends.
    ///
    /// # Errors
    /// A channel is missing or has closed, or a rank has other settings, or does not take part within
    /// [`LinkSettings::limit`].
    pub(crate) async fn open(
        channels: Vec<Option<Channel>>,
        rank: usize,
        pool: &MemoryPool,
        generation: u64,
        settings: &LinkSettings,
    ) -> Result<Self, CollectiveError> {
        let ranks = channels.len();
        if rank >= ranks {
            return Err(setup(format!("rank {rank} of {ranks} ranks")));
        }
        let names = format!("{}/{generation}", settings.names);
        let layout = settings.layout();
        let number = pool.number();
        let outbox = pool.device().allocate(layout.bytes() * ranks)?.share();
        for peer in 0..ranks {
            let hello = Hello::new(layout, rank, number);
            hello.store(&outbox, peer * layout.bytes()).map_err(broken)?;
        }
        let exported =
            pool.device().export_shared(&outbox_name(&names, rank), outbox.clone(), Rights::READ)?;
        let link_setup =
            LinkSetup { pool: pool.clone(), outbox, names, settings: settings.clone(), rank, ranks };

        let mut tasks = JoinSet::new();
        for (peer, channel) in channels.into_iter().enumerate().filter(|(peer, _)| *peer != rank) {
            let Some(channel) = channel else {
                return Err(setup(format!("rank {rank} has no channel to rank {peer}")));
            };
            let link_setup = link_setup.clone();
            tasks.spawn(async move { (peer, link_setup.set_up_in_time(peer, channel).await) });
        }
        let mut peers: Vec<Option<Box<RankLink>>> = (0..ranks).map(|_| None).collect();
        let hosts = &settings.hosts;
        while let Some(met) = tasks.join_next().await {
            let (other, peer) = met.map_err(broken)?;
            let mut peer = peer.map_err(|error| setup(format!("no links to rank {other}: {error}")))?;
            peer.is_across = hosts.of(rank) != hosts.of(other);
            peers[other] = Some(Box::new(peer));
        }
        let inline = peers.iter().flatten().map(|peer| peer.inline()).min();
        Ok(Self {
            inline: inline.unwrap_or(settings.inline as usize),
            pool: number,
            writes: peers.iter().flatten().any(|peer| !peer.is_view()),
            peers,
            common: LinkContext {
                counters: LinkCounters::default(),
                scratch: Scratch::new(),
                delivered: false,
            },
            rounds: 0,
            _outbox: exported,
        })
    }
}

impl LinkSetup {
    async fn set_up_in_time(&self, peer: usize, channel: Channel) -> Result<RankLink, CollectiveError> {
        let limit = self.settings.limit;
        let late = || setup(format!("the set-up of links by both ranks did not happen within {limit:?}"));
        timeout(limit, self.set_up(peer, channel)).await.unwrap_or_else(|_| Err(late()))
    }

    async fn set_up(&self, peer: usize, channel: Channel) -> Result<RankLink, CollectiveError> {
        let layout = self.settings.layout();
        let (ours, theirs) = (peer * layout.bytes(), self.rank * layout.bytes());
        let remote = attach(&channel, &outbox_name(&self.names, peer)).await?;
        if remote.len() != (layout.bytes() * self.ranks) as u64 {
            return Err(other_settings());
        }
        let view = if self.settings.views { view_of(&channel, &remote).await? } else { None };
        let answer = if view.is_some() { Hello::VIEW } else { Hello::NO_VIEW };
        // The last word comes last, and by itself.
        self.outbox.store_u64(ours + Hello::at(WORDS - 1), answer.to_le()).map_err(broken)?;
        let hello = self.receive_hello(&channel, &remote, view.as_ref(), theirs).await?;
        hello.check(layout, peer)?;

        let wire = match view {
            Some(view) if hello.words[4] == Hello::VIEW => {
                Wire::Mapped(MappedWire::new(self.outbox.clone(), ours, view, theirs))
            }
            _ => Wire::Write(Box::new(self.rings(peer, &channel).await?)),
        };
        let Self { settings, pool, .. } = self;
        let (views, attached) = (settings.views, settings.attached);
        let regions = PeerRegions::new(channel.clone(), hello.words[3], views, attached, settings.limit);
        let read = ElementRead::new(pool.device().clone(), &channel, settings.chunk, settings.reads);
        Ok(RankLink::new(wire, layout, channel, regions, read))
    }

    /// Waits until the peer's hello is complete.
    async fn receive_hello(
        &self,
        channel: &Channel,
        remote: &RemoteRegion,
        view: Option<&RegionView>,
        theirs: usize,
    ) -> Result<Hello, CollectiveError> {
        let mut pause = FIRST_PAUSE;
        let mut landing = self.pool.device().allocate(WORDS * 8)?;
        let mut bytes = [0; WORDS * 8];
        loop {
            if let Some(view) = view {
                view.copy_out(theirs + Layout::HELLO, &mut bytes).map_err(broken)?;
            } else {
                let read = channel.read(remote).at((theirs + Layout::HELLO) as u64);
                landing = read.into(landing, ..bytes.len()).await.map_err(TensorError::from)?;
                bytes.copy_from_slice(&landing[..WORDS * 8]);
            }
            let hello =
                Hello { words: bytemuck::pod_read_unaligned::<[u64; WORDS]>(&bytes).map(u64::from_le) };
            if hello.words[WORDS - 1] != 0 {
                return Ok(hello);
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Offers a ring to the peer, and attaches the peer's ring.
    async fn rings(&self, peer: usize, channel: &Channel) -> Result<WriteWire, CollectiveError> {
        let layout = self.settings.layout();
        let (most, least) = (channel.max_inline(), HEADER + REFERENCE);
        if most < least {
            let (provider, device) = channel.device();
            return Err(setup(format!(
                "the device {provider} {device} takes {most} bytes inline, and links need {least}"
            )));
        }
        let ring = self.pool.device().allocate(layout.bytes())?;
        let ring =
            self.pool.device().export(&ring_name(&self.names, self.rank, peer), ring, Rights::WRITE)?;
        let remote = attach(channel, &ring_name(&self.names, peer, self.rank)).await?;
        if remote.len() != layout.bytes() as u64 {
            return Err(other_settings());
        }
        Ok(WriteWire::new(channel.clone(), ring, remote))
    }
}

impl Hello {
    const VIEW: u64 = 1;
    const NO_VIEW: u64 = 2;

    fn new(layout: Layout, rank: usize, pool: u64) -> Self {
        let sizes = u64::from(layout.slots) << 32 | u64::from(layout.inline);
        Self { words: [MAGIC, sizes, rank as u64, pool, 0] }
    }

    /// Returns the offset of a word in a section.
    fn at(word: usize) -> usize {
        Layout::HELLO + 8 * word
    }

    fn store(self, outbox: &SharedRegion, section: usize) -> Result<(), tonic_rdma_tensor::VerbsError> {
        let mut words = self.words.into_iter().enumerate();
        words.try_for_each(|(at, word)| outbox.store_u64(section + Self::at(at), word.to_le()))
    }

    fn check(&self, layout: Layout, peer: usize) -> Result<(), CollectiveError> {
        let expected = Self::new(layout, peer, 0);
        if self.words[0] != MAGIC {
            let format = self.words[0];
            return Err(setup(format!(
                "its links have the format {format:#x}, and those of this rank {MAGIC:#x}"
            )));
        }
        if self.words[1] != expected.words[1] {
            return Err(other_settings());
        }
        if self.words[2] != expected.words[2] {
            let found = self.words[2];
            return Err(setup(format!("it says that it is rank {found}")));
        }
        Ok(())
    }
}

/// Attaches a region that the peer may not have offered yet.
async fn attach(channel: &Channel, name: &str) -> Result<RemoteRegion, TensorError> {
    let mut pause = FIRST_PAUSE;
    loop {
        match channel.region(name).await {
            Err(error) if error.code() == Some(tonic::Code::NotFound) && channel.is_open() => {
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            result => return result,
        }
    }
}

/// Returns the name of the outbox of a rank.
fn outbox_name(names: &str, rank: usize) -> String {
    format!("{names}/{rank}/outbox")
}

/// Returns the name of the ring of a rank for messages of `sender`.
fn ring_name(names: &str, rank: usize, sender: usize) -> String {
    format!("{names}/{rank}/ring/{sender}")
}

fn other_settings() -> CollectiveError {
    setup("it has other settings of links, or another number of ranks")
}

/// Makes the error of something that this rank has checked before.
fn broken(error: impl std::fmt::Display) -> CollectiveError {
    setup(format!("set-up of links: {error}"))
}
