"""Planning without side effects: which units stay on the device, the offsets of slots, the order of use,
predicted step times.

May import `common`. No torch here. Main names: `Plan`, `Region`, `AccessOrder`, `predict`, `Schedule`,
`schedule_in_region`.
"""
