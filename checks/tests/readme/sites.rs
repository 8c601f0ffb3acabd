//! "Large messages": buffers placed by what was sent.

use tonic_rdma::memory::Pool;
use tonic_rdma::memory::sites::{SiteAllocator, SitePlacement, SiteSettings};
use tonic_rdma_proto::transfer::PutRequest;

use super::gather::{Client, LENGTH, connect, pool};
use super::put::byte;
use super::running::{self, Outcome, TURNS, default_runtime};

#[test]
fn what_is_sent_moves_to_registered_memory() {
    running::run(default_runtime(), async {
        let (mut client, sites) = (connect().await?, allocator(pool()));
        for turn in 0..TURNS {
            step(&sites, &mut client, LENGTH, turn).await?;
        }
        let report = sites.report();
        assert_eq!(report.sites.len(), 1);
        assert_eq!(report.sites[0].placement, SitePlacement::Registered);
        assert_eq!(report.sites[0].buffers, TURNS);
        assert_eq!(report.sites[0].registered, TURNS - 1, "all but the first");
        Ok(())
    });
}

#[rustfmt::skip]
fn allocator(pool: Pool) -> SiteAllocator {
    let sites = SiteAllocator::new(pool, SiteSettings::default());   // the pool above
    sites
}

#[rustfmt::skip]
async fn step(sites: &SiteAllocator, client: &mut Client, length: usize, turn: u64) -> Outcome {
    let mut gradients = sites.allocate(length);      // a site is this line, or a name: allocate_named("conv1", length)
    // ... fill it, freeze it into Bytes, send it ...
    gradients.fill(byte(turn));
    client.put(PutRequest { payload: gradients.freeze(), ..Default::default() }).await?;
    sites.next_iteration();                          // println!("{}", sites.report()) says what was learnt, and why
    Ok(())
}
