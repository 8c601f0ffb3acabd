//! Counters of each connection, and their totals for the `metrics` facade.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident => $metric:literal;)+) => {
        /// Live counters of one connection.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)+
        }

        /// The counters of a connection at one moment, from [`RdmaConnectInfo::counters`](crate::RdmaConnectInfo::counters). They
        /// count from the start of the connection.
        ///
        /// ```
        /// use tonic_rdma::{CounterSnapshot, RdmaConnectInfo};
        ///
        /// fn sent(info: &RdmaConnectInfo, before: &CounterSnapshot) -> u64 {
        ///     let now = info.counters();
        ///     now.eager_sent_bytes + now.rendezvous_sent_bytes - before.eager_sent_bytes - before.rendezvous_sent_bytes
        /// }
        /// # let _ = sent;
        /// ```
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct CounterSnapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
            /// Times the completion queue was polled. The queue also serves other connections.
            pub polls: u64,
            /// Times the completion queue was armed so that its poller could sleep.
            pub sleeps: u64,
        }

        impl Counters {
            /// Returns the values at this moment.
            pub(crate) fn snapshot(&self) -> CounterSnapshot {
                CounterSnapshot { $($name: self.$name.value(),)+ polls: 0, sleeps: 0 }
            }

            /// Adds the increments since the last call to the process's metrics.
            pub(crate) fn publish(&self) {
                $(
                    let fresh = self.$name.unpublished();
                    if fresh > 0 {
                        metrics::counter!($metric).increment(fresh);
                    }
                )+
            }
        }
    };
}

counters! {
    /// Messages sent eagerly: copied into a receive buffer of the peer.
    eager_sent => "tonic_rdma_eager_messages_sent_total";
    /// Bytes sent eagerly.
    eager_sent_bytes => "tonic_rdma_eager_bytes_sent_total";
    /// Messages received eagerly.
    eager_received => "tonic_rdma_eager_messages_received_total";
    /// Bytes received eagerly.
    eager_received_bytes => "tonic_rdma_eager_bytes_received_total";
    /// Writes offered by rendezvous.
    rendezvous_sent => "tonic_rdma_rendezvous_messages_sent_total";
    /// Bytes offered by rendezvous.
    rendezvous_sent_bytes => "tonic_rdma_rendezvous_bytes_sent_total";
    /// Chunks fetched by RDMA READ.
    reads => "tonic_rdma_reads_total";
    /// Bytes fetched by RDMA READ.
    rendezvous_received_bytes => "tonic_rdma_rendezvous_bytes_received_total";
    /// Bytes that went straight from the writer's memory into the peer's receive buffer, without a copy into a send
    /// buffer.
    copies_avoided_bytes => "tonic_rdma_copies_avoided_bytes_total";
    /// Bytes of native calls that the peer fetches from where the application wrote them.
    offered_in_place_bytes => "tonic_rdma_offered_in_place_bytes_total";
    /// Bytes of native calls that were copied into memory from which the peer fetches them.
    offered_copied_bytes => "tonic_rdma_offered_copied_bytes_total";
    /// Bytes of native calls that were fetched from the peer into registered memory.
    landed_bytes => "tonic_rdma_landed_bytes_total";
    /// Bytes of messages of native calls that reached their decoder in the memory that they landed in.
    decoded_in_place_bytes => "tonic_rdma_decoded_in_place_bytes_total";
    /// Bytes of native calls that landed, and that tonic copies before it decodes them.
    landed_copied_bytes => "tonic_rdma_landed_copied_bytes_total";
    /// Small writes that were copied and gathered, to be sent together as one message.
    coalesced_writes => "tonic_rdma_coalesced_writes_total";
    /// Times a writer had to wait because the peer had no receive buffer free.
    credit_stalls => "tonic_rdma_credit_stalls_total";
    /// Times a writer had to wait for its own send queue or send memory.
    send_stalls => "tonic_rdma_send_stalls_total";
    /// Control messages sent: acknowledgements with credits, pings and their answers, returned credits, the end of the stream,
    /// and aborts.
    acks_sent => "tonic_rdma_acks_sent_total";
    /// Work requests posted to the send queue.
    work_requests => "tonic_rdma_work_requests_total";
}

/// A counter. Additions need a lock; reading needs no lock.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    value: AtomicU64,
    published: AtomicU64,
}

impl Counter {
    /// Adds `count`. The caller holds the lock of the counter's owner, so a plain load and store suffice.
    pub(crate) fn add(&self, count: u64) {
        self.value.store(self.value.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// Returns the count.
    pub(crate) fn value(&self) -> u64 {
        self.value.load(Ordering::Relaxed)
    }

    /// Returns the increment since the last call.
    fn unpublished(&self) -> u64 {
        let value = self.value();
        value.wrapping_sub(self.published.swap(value, Ordering::Relaxed))
    }
}

/// Counters of the polls of a completion queue.
#[derive(Debug, Default)]
pub(crate) struct PollCounters {
    pub(crate) polls: Counter,
    pub(crate) sleeps: Counter,
}
