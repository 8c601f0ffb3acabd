//! The record of a turn's operations. Each end makes a record. The two records are compared when the turn is over.

use tonic_rdma_proto::placement::{EndReply, Mismatch};

use tonic_rdma_payload::reduce::Reduced;
use tonic_rdma_payload::seeded::mix;

/// The operations of a turn: their number, identity and order, and the result of consuming them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    operations: u64,
    identities: u64,
    consumed: u64,
    mismatch: Option<(u64, u64)>,
}

/// The reason why the records of both ends differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Discrepancy {
    /// The number of operations differs.
    #[error("{sent} operations were sent and {arrived} arrived")]
    Count { sent: u64, arrived: u64 },
    /// Other operations arrived, or the operations arrived in another order.
    #[error("other operations arrived than were sent, or in another order")]
    Identity,
    /// The receiver found other content in the operations.
    #[error("the receiver found something else in what arrived than was sent")]
    Consumed,
}

impl Record {
    /// Adds an operation: the seed of its content, and the result of consuming it if it is consumed.
    pub(super) fn add(&mut self, identity: Option<u64>, reduced: Option<Reduced>) {
        self.operations += 1;
        // An unknown operation counts as a seed that almost surely no operation has, because seeds are spread over all
        // 64 bits.
        self.identities = mix(self.identities ^ identity.unwrap_or(u64::MAX));
        // The sign of zero does not count.
        let maximum = reduced.map_or(u64::MAX, |it| (it.maximum + 0.0).to_bits().into());
        self.consumed = mix(mix(self.consumed ^ maximum) ^ reduced.map_or(0, |it| it.digest));
    }

    /// Notes a wrong byte: the buffer, and the offset in the buffer. Only the first wrong byte is kept.
    pub(super) fn wrong(&mut self, buffer: u64, offset: u64) {
        self.mismatch.get_or_insert((buffer, offset));
    }

    /// Returns buffer and offset of the first wrong byte.
    pub(super) fn mismatch(&self) -> Option<(u64, u64)> {
        self.mismatch
    }

    /// Compares this record, made by the sender, with `arrived`, made by the receiver.
    pub(super) fn compare(&self, arrived: &Self) -> Result<(), Discrepancy> {
        if self.operations != arrived.operations {
            Err(Discrepancy::Count { sent: self.operations, arrived: arrived.operations })
        } else if self.identities != arrived.identities {
            Err(Discrepancy::Identity)
        } else if self.consumed != arrived.consumed {
            Err(Discrepancy::Consumed)
        } else {
            Ok(())
        }
    }
}

impl From<Record> for EndReply {
    fn from(record: Record) -> Self {
        let Record { operations, identities, consumed, mismatch } = record;
        let mismatch = mismatch.map(|(buffer, offset)| Mismatch { buffer, offset });
        Self { operations, identities, consumed, mismatch }
    }
}

impl From<EndReply> for Record {
    fn from(reply: EndReply) -> Self {
        let EndReply { operations, identities, consumed, mismatch } = reply;
        let mismatch = mismatch.map(|it| (it.buffer, it.offset));
        Self { operations, identities, consumed, mismatch }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(operations: &[(u64, f32)]) -> Record {
        let mut record = Record::default();
        for (identity, maximum) in operations {
            record.add(Some(*identity), Some(Reduced { maximum: *maximum, digest: 7 }));
        }
        record
    }

    #[test]
    fn records_differ_by_count_order_identity_maximum_and_digest() {
        let sent = record(&[(1, 0.5), (2, -0.0), (1, 2.0)]);
        assert_eq!(sent.compare(&record(&[(1, 0.5), (2, 0.0), (1, 2.0)])), Ok(()));
        let (count, other) = (Discrepancy::Count { sent: 3, arrived: 2 }, Discrepancy::Identity);
        assert_eq!(sent.compare(&record(&[(1, 0.5), (2, 0.0)])), Err(count));
        for wrong in [[(2, 0.5), (1, 0.0), (1, 2.0)], [(1, 0.5), (2, 0.0), (2, 2.0)]] {
            assert_eq!(sent.compare(&record(&wrong)), Err(other));
        }
        let wrong = record(&[(1, 0.5), (2, 0.0), (1, 2.5)]);
        assert_eq!(sent.compare(&wrong), Err(Discrepancy::Consumed));
        assert_eq!(Record::from(EndReply::from(wrong)), wrong);
        let with = |digest| {
            let mut record = Record::default();
            record.add(Some(1), Some(Reduced { maximum: 0.5, digest }));
            record
        };
        assert_eq!(with(1).compare(&with(2)), Err(Discrepancy::Consumed));
    }

    #[test]
    fn the_first_wrong_byte_is_kept() {
        let mut record = Record::default();
        record.wrong(3, 4);
        record.wrong(0, 0);
        assert_eq!(record.mismatch(), Some((3, 4)));
        let reply: EndReply = record.into();
        assert_eq!(Record::from(reply).mismatch(), Some((3, 4)));
    }
}
