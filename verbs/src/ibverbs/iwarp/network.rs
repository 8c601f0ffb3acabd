//! Addresses of this machine, and the form of addresses in system calls.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV6};
use std::ptr;

use crate::VerbsError;

/// Returns the form of an address that system calls take: IPv4 for a mapped IPv4 address.
pub(crate) fn socket_address(address: SocketAddrV6) -> libc::sockaddr_storage {
    // SAFETY: all zeros are a valid value of this structure.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let start = &raw mut storage;
    match address.ip().to_ipv4_mapped() {
        Some(ip) => {
            let address = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(ip).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage is long enough for any address, and aligned for it.
            unsafe { start.cast::<libc::sockaddr_in>().write(address) };
        }
        None => {
            let address = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            };
            // SAFETY: the storage is long enough for any address, and aligned for it.
            unsafe { start.cast::<libc::sockaddr_in6>().write(address) };
        }
    }
    storage
}

/// Returns the addresses of this machine's network interfaces that other machines can reach, IPv4 first.
pub(crate) fn local_addresses() -> Result<Vec<IpAddr>, VerbsError> {
    let mut list = ptr::null_mut();
    // SAFETY: the result is writable.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(crate::ibverbs::library::last_error("listing the addresses of this machine"));
    }
    let mut addresses = Vec::new();
    let mut next: *const libc::ifaddrs = list;
    // SAFETY: the list is linked, and stays as it is until it is freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: an entry's address is null, or complete.
        addresses.extend(unsafe { ip(entry.ifa_addr) });
    }
    // SAFETY: the list came from `getifaddrs`, and is freed once.
    unsafe { libc::freeifaddrs(list) };
    addresses.retain(|address| match address {
        IpAddr::V4(ip) => !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_loopback() && ip.segments()[0] & 0xffc0 != 0xfe80,
    });
    addresses.sort_by_key(IpAddr::is_ipv6);
    Ok(addresses)
}

/// Returns the address in a structure of the system, if it is an IPv4 or IPv6 address.
///
/// # Safety
/// - `address` must be null, or complete for its family.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: by this function's contract.
    unsafe {
        match i32::from(address.as_ref()?.sa_family) {
            libc::AF_INET => {
                let address = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let address = address.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_the_round_trip() {
        for (address, expected) in [("[::ffff:10.1.2.3]:7", "10.1.2.3"), ("[2001:db8::1]:7", "2001:db8::1")] {
            let storage = socket_address(address.parse().unwrap());
            // SAFETY: the address is complete.
            let found = unsafe { ip((&raw const storage).cast()) };
            assert_eq!(found, Some(expected.parse().unwrap()));
        }
        assert!(local_addresses().unwrap().iter().all(|address| !address.is_loopback()));
    }
}
