//! The device's memory.

/// Where the first buffer lies: above every address that a process can map, so that the host cannot read a device pointer by mistake.
const FIRST_ADDRESS: u64 = 1 << 49;
/// Free addresses behind each buffer: a kernel that runs past an end does not find the next buffer there.
const GAP: u64 = 1 << 20;
const ALIGNMENT: u64 = 256;
/// What fresh memory holds: NaN in every floating-point format, -1 as an index.
const FRESH: u8 = 0xff;

/// Device memory: buffers at virtual addresses.
///
/// Addresses are multiples of 256 and never used twice, so that an access through an old pointer is known to be one.
#[derive(Debug)]
pub struct Memory {
    capacity: usize,
    used: usize,
    next: u64,
    /// Ascending by address, freed ones included.
    buffers: Vec<Buffer>,
}

/// One allocation.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub base: u64,
    /// Bytes asked for, also after the buffer was freed.
    pub bytes: u64,
    pub data: Vec<u8>,
    pub freed: bool,
}

impl Buffer {
    /// True if `address` lies inside.
    pub fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.base) < self.bytes
    }
}

impl Memory {
    /// Memory that holds `capacity` bytes.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, used: 0, next: FIRST_ADDRESS, buffers: Vec::new() }
    }

    /// A buffer of `bytes` bytes, each 0xff; none if they do not fit or are zero.
    pub fn allocate(&mut self, bytes: usize) -> Option<u64> {
        if bytes == 0 || bytes > self.free_bytes() {
            return None;
        }
        let (base, size) = (self.next, bytes as u64);
        self.next = base + size.next_multiple_of(ALIGNMENT) + GAP;
        self.used += bytes;
        self.buffers.push(Buffer { base, bytes: size, data: vec![FRESH; bytes], freed: false });
        Some(base)
    }

    /// Gives a buffer back. False if `address` is not the beginning of one that is in use.
    pub fn free(&mut self, address: u64) -> bool {
        match self.find(address) {
            Some(index) if self.buffers[index].base == address && !self.buffers[index].freed => {
                let buffer = &mut self.buffers[index];
                buffer.freed = true;
                buffer.data = Vec::new();
                self.used -= buffer.bytes as usize;
                true
            }
            _ => false,
        }
    }

    /// `bytes` bytes from `address`, if they lie in one buffer in use.
    pub fn read(&self, address: u64, bytes: usize) -> Option<&[u8]> {
        let buffer = &self.buffers[self.find(address)?];
        let start = usize::try_from(address - buffer.base).ok()?;
        buffer.data.get(start..start.checked_add(bytes)?)
    }

    /// The same to write to.
    pub fn write(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let index = self.find(address)?;
        let buffer = &mut self.buffers[index];
        let start = usize::try_from(address - buffer.base).ok()?;
        buffer.data.get_mut(start..start.checked_add(bytes)?)
    }

    /// The buffer in use that holds `address`: where it begins, and its bytes.
    pub fn buffer_of(&self, address: u64) -> Option<(u64, usize)> {
        let buffer = &self.buffers[self.find(address)?];
        (!buffer.freed).then_some((buffer.base, buffer.bytes as usize))
    }

    /// Bytes that can still be allocated.
    pub fn free_bytes(&self) -> usize {
        self.capacity - self.used
    }

    /// Bytes in all.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Index of the buffer, in use or freed, that holds `address`.
    pub(crate) fn find(&self, address: u64) -> Option<usize> {
        let index = self.nearest(address)?;
        self.buffers[index].contains(address).then_some(index)
    }

    /// Index of the last buffer that begins at or before `address`.
    pub(crate) fn nearest(&self, address: u64) -> Option<usize> {
        self.buffers.partition_point(|buffer| buffer.base <= address).checked_sub(1)
    }

    pub(crate) fn buffer(&self, index: usize) -> &Buffer {
        &self.buffers[index]
    }

    pub(crate) fn buffer_mut(&mut self, index: usize) -> &mut Buffer {
        &mut self.buffers[index]
    }

    pub(crate) fn num_buffers(&self) -> usize {
        self.buffers.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_buffer_is_aligned_full_of_ones_and_no_host_address() {
        let mut memory = Memory::new(1000);
        let (first, second) = (memory.allocate(100).unwrap(), memory.allocate(900).unwrap());
        assert!(first >= 1 << 49 && first % 256 == 0 && second % 256 == 0 && second - first >= 356);
        assert_eq!(memory.read(first, 100), Some(&[0xff; 100][..]));
        assert_eq!((memory.free_bytes(), memory.capacity()), (0, 1000));
        assert_eq!(memory.allocate(1), None);
    }

    #[test]
    fn bytes_past_an_end_are_not_there() {
        let mut memory = Memory::new(1000);
        let address = memory.allocate(16).unwrap();
        assert!(memory.write(address + 8, 8).is_some());
        assert!(memory.write(address + 8, 9).is_none());
        assert!(memory.read(address - 1, 1).is_none());
        assert_eq!(memory.buffer_of(address + 15), Some((address, 16)));
    }

    #[test]
    fn a_freed_buffer_gives_its_room_back_but_not_its_address() {
        let mut memory = Memory::new(16);
        let first = memory.allocate(16).unwrap();
        assert!(!memory.free(first + 4));
        assert!(memory.free(first));
        assert!(!memory.free(first));
        assert!(memory.read(first, 1).is_none());
        assert_ne!(memory.allocate(16), Some(first));
    }
}
