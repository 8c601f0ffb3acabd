//! "Large messages": buffers in registered memory, chosen by the allocator.

use tonic_rdma::memory::Pool;
use tonic_rdma::memory::sites::{SiteAllocator, SitePlacement, SiteSettings};
use tonic_rdma_proto::transfer::PutRequest;

use super::gather::{Client, LENGTH, connect, pool};
use super::put::byte;
use super::running::{self, Outcome, ROUNDS, default_runtime};

#[test]
fn sent_buffers_move_to_registered_memory() {
    running::run(default_runtime(), async {
        let (mut client, sites) = (connect().await?, allocator(pool()));
        for round in 0..ROUNDS {
            step(&sites, &mut client, LENGTH, round).await?;
        }
        let report = sites.report();
        assert_eq!(report.sites.len(), 1);
        assert_eq!(report.sites[0].placement, SitePlacement::Registered);
        assert_eq!(report.sites[0].buffers, ROUNDS);
        assert_eq!(report.sites[0].registered, ROUNDS - 1, "all but the first");
        Ok(())
    });
}

#[rustfmt::skip]
fn allocator(pool: Pool) -> SiteAllocator {
    let sites = SiteAllocator::new(pool, SiteSettings::default());   // the pool above
    sites
}

#[rustfmt::skip]
async fn step(sites: &SiteAllocator, client: &mut Client, length: usize, round: u64) -> Outcome {
    let mut gradients = sites.allocate(length);      // a site is this line, or a name: allocate_named("conv1", length)
    // ... fill it, freeze it into Bytes, send it ...
    gradients.fill(byte(round));
    client.put(PutRequest { payload: gradients.freeze(), ..Default::default() }).await?;
    sites.next_iteration();                          // println!("{}", sites.report()) says what was learnt, and why
    Ok(())
}
